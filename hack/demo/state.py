"""Asks the demo's program how it is: run by `kubectl exec`, prints a name and a value a line."""

import json
import urllib.request

state = json.load(urllib.request.urlopen("http://127.0.0.1:8080/", timeout=20))
for name, value in state.items():
    if isinstance(value, dict):
        for part, word in value.items():
            print(f"{name}.{part}", word)
    else:
        print(name, value)
