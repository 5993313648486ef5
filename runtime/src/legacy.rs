//! Upstream's legacy HTTP API.

use std::sync::Arc;

use http::{Request, Response, StatusCode};
use hyper::body::Incoming;
use serde_json::json;

use crate::{
    execute, files,
    orphans::Children,
    refusal::{Body, Refusal, answer},
    root::Root,
    route::{Route, route},
    server::Calls,
    upload,
};

/// Maximum size of the body of a command, in bytes; the kernel refuses larger commands.
const MAX_COMMAND: u64 = 4 << 20;

/// Limits of the calls.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    pub execute: execute::Limits,
    pub upload: upload::Limits,
}

/// Calls of the legacy API, on the files of `root` and commands in it.
#[derive(Debug)]
pub struct Legacy {
    pub root: Arc<Root>,
    pub children: Arc<Children>,
    pub settings: Settings,
}

impl Calls for Legacy {
    type Refusal = Refusal;
    const HEALTH: &'static str = "/";

    async fn call(&self, request: Request<Incoming>) -> Result<Response<Body>, Refusal> {
        let route = route(request.method(), request.uri().path())?;
        let (head, body) = request.into_parts();
        match route {
            Route::Health => {
                let status = json!({"status": "ok", "message": "Sandbox Runtime is active."});
                Ok(answer(StatusCode::OK, &status))
            }
            Route::Execute => {
                let limits = upload::Limits {
                    bytes: MAX_COMMAND,
                    ..self.settings.upload
                };
                self.execute(&upload::whole(body, limits).await?).await
            }
            Route::Upload => {
                let limits = self.settings.upload;
                // A client that sends `Expect: 100-continue` gets the refusal before the body.
                if limits.refuse(&head.headers) {
                    return Err(Refusal::TooLarge);
                }
                upload::upload(&self.root, &head.headers, body, limits).await
            }
            Route::Download(path) => files::download(&self.root, path).await,
            Route::List(path) => files::list(&self.root, path).await,
            Route::Exists(path) => files::exists(&self.root, path).await,
        }
    }
}

impl Legacy {
    async fn execute(&self, body: &[u8]) -> Result<Response<Body>, Refusal> {
        let execute::Request { command, time } = execute::request_of(body)?;
        let (directory, mut limits) = (self.root.path(), self.settings.execute);
        limits.time = time.map_or(limits.time, |time| time.min(limits.time));
        let outcome = execute::execute(&command, directory, limits, &self.children).await;
        Ok(answer(StatusCode::OK, &outcome.body()))
    }
}
