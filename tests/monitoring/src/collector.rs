//! Collector of OTLP over gRPC on this machine, for tests of exports.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};

use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span;
use tokio::net::TcpListener;

/// Spans that were exported so far, each with the service of its resource.
#[derive(Clone, Debug, Default)]
pub struct Collector(Arc<Mutex<Vec<(String, Span)>>>);

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: tonic::Request<ExportTraceServiceRequest>,
    ) -> Result<tonic::Response<ExportTraceServiceResponse>, tonic::Status> {
        let mut received = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for of in request.into_inner().resource_spans {
            let attributes = of.resource.unwrap_or_default().attributes;
            let service = attributes.iter().find(|pair| pair.key == "service.name");
            let service = format!("{:?}", service.and_then(|pair| pair.value.clone()));
            let spans = of.scope_spans.into_iter().flat_map(|scope| scope.spans);
            received.extend(spans.map(|span| (service.clone(), span)));
        }
        Ok(tonic::Response::new(ExportTraceServiceResponse::default()))
    }
}

impl Collector {
    /// Listens on this machine until the test's runtime ends.
    pub async fn start(&self) -> std::io::Result<SocketAddr> {
        self.start_at(IpAddr::V4(Ipv4Addr::LOCALHOST)).await
    }

    /// Listens at one of the machine's addresses until the test's runtime ends.
    pub async fn start_at(&self, address: IpAddr) -> std::io::Result<SocketAddr> {
        let listener = TcpListener::bind((address, 0)).await?;
        let address = listener.local_addr()?;
        let service = TowerToHyperService::new(TraceServiceServer::new(self.clone()));
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let service = service.clone();
                tokio::spawn(async move {
                    let server = auto::Builder::new(TokioExecutor::new());
                    // The connection ends with the exporter.
                    let _ = server.serve_connection(TokioIo::new(stream), service).await;
                });
            }
        });
        Ok(address)
    }

    /// Returns all spans, each with its service.
    pub fn received(&self) -> Vec<(String, Span)> {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Returns the spans of one name.
    pub fn named(&self, name: &str) -> Vec<Span> {
        let received = self.received().into_iter();
        let spans = received.map(|(_, span)| span);
        spans.filter(|span| span.name == name).collect()
    }
}

/// Returns an attribute of a span, if it exists and is a text.
pub fn attribute<'a>(span: &'a Span, key: &str) -> Option<&'a str> {
    let pair = span.attributes.iter().find(|pair| pair.key == key)?;
    match pair.value.as_ref()?.value.as_ref()? {
        Value::StringValue(text) => Some(text),
        _ => None,
    }
}

/// Returns an attribute of a span, if it exists and is a number.
pub fn number(span: &Span, key: &str) -> Option<i64> {
    let pair = span.attributes.iter().find(|pair| pair.key == key)?;
    match pair.value.as_ref()?.value.as_ref()? {
        Value::IntValue(number) => Some(*number),
        _ => None,
    }
}

/// Formats an id of a trace or of a span as carriers write it.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
