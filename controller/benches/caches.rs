//! Measures the controller's memory with caches full of large objects: `caches SANDBOXES KIBIBYTES
//! [whole]`.
//!
//! With `whole` the cache keeps complete Sandboxes instead of outlines. The program prints the size
//! of all objects, and its own memory before, at the peak and at the end, in MiB. The apiserver
//! runs in the same process and generates each page of a list anew, so it holds no objects.

use std::{convert::Infallible, sync::Arc, time::Duration};

use anyhow::{Context as _, bail};
use http::{Request, Response, Uri};
use kube::{Client, client::Body};
use tokio::task::JoinSet;
use torpor_controller::{
    cache::Cache, calls::Apiserver, context::Context, settings::Settings, watches,
};

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args()
        .skip(1)
        .filter(|argument| argument != "--bench")
        .collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words.as_slice() {
        [count, kibibytes] => fill(count.parse()?, kibibytes.parse()?, false).await,
        [count, kibibytes, "whole"] => fill(count.parse()?, kibibytes.parse()?, true).await,
        // `cargo test` runs benchmarks without arguments.
        [] => Ok(()),
        _ => bail!("usage: SANDBOXES KIBIBYTES [whole]"),
    }
}

async fn fill(count: usize, kibibytes: usize, whole: bool) -> anyhow::Result<()> {
    let objects = Objects { count, kibibytes };
    let bytes = objects.sandbox(0).len() * count;
    let before = memory("VmRSS")?;
    let service = tower::service_fn(move |request: Request<Body>| async move {
        Ok::<_, Infallible>(objects.answer(request.uri()).await)
    });
    let api = Apiserver::new(Client::new(service, "default"), Duration::from_secs(60));
    let settings = Settings {
        extensions: true,
        ..Settings::default()
    };
    let mut context = Context::new(api, "cluster.local".to_owned(), settings);
    if whole {
        context.caches.sandboxes = Cache::new(watches::extensions::sandbox_index);
    }
    let context = Arc::new(context);
    let mut tasks = JoinSet::new();
    watches::start(&context, &mut tasks);
    context.caches.wait_ready(&context.settings).await;
    let kept = context.caches.sandboxes.filtered(|_| true).len();
    println!(
        "sandboxes {kept} objects_mib {} before_mib {before} peak_mib {} end_mib {}",
        bytes >> 20,
        memory("VmHWM")?,
        memory("VmRSS")?
    );
    Ok(())
}

/// Returns a value of `/proc/self/status`, in MiB.
fn memory(name: &str) -> anyhow::Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find(|line| line.starts_with(name));
    let kibibytes = line.and_then(|line| line.split_whitespace().nth(1));
    Ok(kibibytes.context("no such value")?.parse::<u64>()? >> 10)
}

#[derive(Clone, Copy)]
struct Objects {
    count: usize,
    kibibytes: usize,
}

impl Objects {
    /// Returns a Sandbox of the given size, made of environment variables of 128 bytes each.
    ///
    /// The JSON is written as text: a parsed page would be most of this process's memory.
    fn sandbox(self, at: usize) -> String {
        let mut text = format!(
            r#"{{"apiVersion":"agents.x-k8s.io/v1beta1","kind":"Sandbox","metadata":{{"name":"s{at}","namespace":"ns","uid":"u{at}","resourceVersion":"5"}},"spec":{{"podTemplate":{{"spec":{{"containers":[{{"name":"c","image":"img","env":["#
        );
        for number in 0..self.kibibytes * 8 {
            let comma = if number > 0 { "," } else { "" };
            let value = format!("{at:05}-{number:06}").repeat(7);
            text += &format!(r#"{comma}{{"name":"VARIABLE_{number:06}","value":"{value}"}}"#);
        }
        text + "]}]}}}}"
    }

    /// Returns a page of Sandboxes, an empty list of another kind, or a watch without events.
    async fn answer(self, uri: &Uri) -> Response<Body> {
        let parameter = |key: &str| {
            let query = uri.query().unwrap_or_default().split('&');
            query
                .filter_map(|pair| pair.split_once('='))
                .find_map(|(name, value)| (name == key).then(|| value.to_owned()))
        };
        if parameter("watch").is_some() {
            std::future::pending::<()>().await;
        }
        let number = |key| parameter(key).and_then(|text| text.parse::<usize>().ok());
        let mut list = String::from(r#"{"apiVersion":"v1","kind":"List","items":["#);
        let mut next = String::new();
        if uri.path().ends_with("/sandboxes") {
            let begin = number("continue").unwrap_or_default();
            let end = self
                .count
                .min(begin + number("limit").unwrap_or(self.count));
            for at in begin..end {
                if at > begin {
                    list.push(',');
                }
                list += &self.sandbox(at);
            }
            if end < self.count {
                next = end.to_string();
            }
        }
        list += &format!(r#"],"metadata":{{"resourceVersion":"5","continue":"{next}"}}}}"#);
        Response::new(Body::from(list.into_bytes()))
    }
}
