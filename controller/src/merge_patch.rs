//! JSON merge patches (RFC 7386) from the current and the wanted form of an object.

use serde_json::{Map, Value};

/// Returns the smallest patch that turns `old` into `new`, or `None` if they are equal.
///
/// A patch replaces lists as a whole.
pub fn difference(old: &Value, new: &Value) -> Option<Value> {
    match (old, new) {
        (Value::Object(old), Value::Object(new)) => object_difference(old, new).map(Value::Object),
        _ if old == new => None,
        _ => Some(new.clone()),
    }
}

fn object_difference(
    old: &Map<String, Value>,
    new: &Map<String, Value>,
) -> Option<Map<String, Value>> {
    let mut patch = Map::new();
    for (key, value) in new {
        match old.get(key) {
            None => {
                patch.insert(key.clone(), value.clone());
            }
            Some(before) => {
                if let Some(changed) = difference(before, value) {
                    patch.insert(key.clone(), changed);
                }
            }
        }
    }
    for key in old.keys().filter(|key| !new.contains_key(*key)) {
        patch.insert(key.clone(), Value::Null);
    }
    (!patch.is_empty()).then_some(patch)
}

#[cfg(test)]
pub(crate) use torpor_test_apiserver::merge_patch::apply;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    #[test]
    fn equal_values_need_no_patch() {
        assert_eq!(difference(&json!({"a": [1]}), &json!({"a": [1]})), None);
    }

    #[test]
    fn a_removed_key_is_set_to_null_and_a_list_is_replaced() {
        let old = json!({"a": 1, "b": {"c": 1, "d": 2}, "e": [1, 2]});
        let new = json!({"b": {"c": 1}, "e": [2]});
        let patch = difference(&old, &new).unwrap();
        assert_eq!(patch, json!({"a": null, "b": {"d": null}, "e": [2]}));
    }

    fn json_without_null() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            any::<bool>().prop_map(Value::from),
            (0..4_i64).prop_map(Value::from),
            "[ab]{0,2}".prop_map(Value::from)
        ];
        leaf.prop_recursive(3, 20, 4, |below| {
            prop_oneof![
                prop::collection::vec(below.clone(), 0..3).prop_map(Value::from),
                prop::collection::btree_map("[a-d]", below, 0..4)
                    .prop_map(|map| Value::Object(map.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn applying_the_difference_gives_the_new_value(
            old in json_without_null(), new in json_without_null()
        ) {
            let mut target = old.clone();
            if let Some(patch) = difference(&old, &new) {
                apply(&mut target, &patch);
            }
            prop_assert_eq!(target, new);
        }
    }
}
