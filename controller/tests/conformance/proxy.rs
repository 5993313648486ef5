//! Proxy before the apiserver that can forbid and allow one path while clients watch it.

use std::{sync::Arc, time::Duration};

use axum::body::Body;
use futures::StreamExt;
use http::{Request, Response};
use kube::Client;
use serde_json::json;
use tokio::sync::watch;

use crate::apiserver::Apiserver;

/// Proxy before the apiserver. Clones share their state.
#[derive(Clone)]
pub(crate) struct Proxy {
    api: Client,
    /// Suffix of the paths that may be forbidden.
    part: &'static str,
    forbids: Arc<watch::Sender<bool>>,
    /// Number of refused requests.
    refused: Arc<watch::Sender<usize>>,
}

impl Proxy {
    /// Returns a proxy that allows everything; `part` is the suffix of a path, such as a kind.
    pub(crate) fn new(api: &Apiserver, part: &'static str) -> Self {
        Self {
            api: api.client(),
            part,
            forbids: Arc::new(watch::channel(false).0),
            refused: Arc::new(watch::channel(0).0),
        }
    }

    pub(crate) fn client(&self) -> Client {
        let proxy = self.clone();
        let serve = move |request| {
            let proxy = proxy.clone();
            async move { proxy.answer(request).await }
        };
        Client::new(tower::service_fn(serve), "default")
    }

    /// Ends watches of the part and refuses its requests from now on.
    pub(crate) fn forbid(&self) {
        self.forbids.send_replace(true);
    }

    pub(crate) fn allow(&self) {
        self.forbids.send_replace(false);
    }

    /// Waits until the total number of refused requests reaches `times`.
    pub(crate) async fn has_refused(&self, times: usize) {
        let mut refused = self.refused.subscribe();
        let enough = refused.wait_for(|refused| *refused >= times);
        let enough = tokio::time::timeout(Duration::from_secs(20), enough);
        enough.await.expect("it is asked again").unwrap();
    }

    async fn answer(
        &self,
        request: Request<kube::client::Body>,
    ) -> Result<Response<Body>, kube::Error> {
        let is_part = request.uri().path().ends_with(self.part);
        if is_part && *self.forbids.borrow() {
            self.refused.send_modify(|refused| *refused += 1);
            let status = json!({
                "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 403,
                "reason": "Forbidden", "message": format!("{} is forbidden: made to fail", self.part),
            });
            let mut refusal = Response::new(Body::from(status.to_string()));
            *refusal.status_mut() = http::StatusCode::FORBIDDEN;
            return Ok(refusal);
        }
        let answer = self.api.send(request).await?.map(Body::new);
        if !is_part {
            return Ok(answer);
        }
        let mut forbids = self.forbids.subscribe();
        let end = async move { drop(forbids.wait_for(|forbids| *forbids).await) };
        let cut = |body: Body| Body::from_stream(body.into_data_stream().take_until(end));
        Ok(answer.map(cut))
    }
}
