use std::convert::Infallible;

use prometheus_client::encoding::text::encode;
use proptest::prelude::*;
use tower::{ServiceBuilder, ServiceExt, service_fn};

use super::*;

/// Takes a token if the bucket has one, else returns the time until one arrives.
fn pass(bucket: &mut Bucket, now: Instant) -> Result<(), Duration> {
    match bucket.wait(now) {
        None => {
            bucket.take();
            Ok(())
        }
        Some(wait) => Err(wait),
    }
}

#[test]
fn a_burst_passes_at_once_and_then_the_rate_holds() {
    let rate = Rate::of(4.0, 2).unwrap();
    let begin = Instant::now();
    let mut bucket = Bucket::full(rate, begin);
    assert_eq!(pass(&mut bucket, begin), Ok(()));
    assert_eq!(pass(&mut bucket, begin), Ok(()));
    assert_eq!(pass(&mut bucket, begin), Err(Duration::from_millis(250)));
    let later = begin + Duration::from_millis(250);
    assert_eq!(pass(&mut bucket, later), Ok(()));
    assert_eq!(pass(&mut bucket, later), Err(Duration::from_millis(250)));
    // A long pause brings no more than the burst.
    let rested = later + Duration::from_secs(60);
    assert_eq!(
        (pass(&mut bucket, rested), pass(&mut bucket, rested)),
        (Ok(()), Ok(()))
    );
    pass(&mut bucket, rested).unwrap_err();
}

#[test]
fn a_rate_that_is_not_positive_is_no_limit() {
    assert_eq!((Rate::of(-1.0, 10), Rate::of(0.0, 10)), (None, None));
}

proptest! {
    /// In any span, the calls that pass are at most the burst and the tokens of the rate.
    #[test]
    fn no_schedule_exceeds_the_rate(
        per_second in 0.1_f64..500.0,
        burst in 1_u32..50,
        gaps in proptest::collection::vec(0_u64..2000, 1..200),
    ) {
        let begin = Instant::now();
        let mut bucket = Bucket::full(Rate { per_second, burst }, begin);
        let (mut now, mut passed) = (begin, 0_u32);
        for gap in gaps {
            now += Duration::from_millis(gap);
            while pass(&mut bucket, now).is_ok() {
                passed += 1;
            }
            let most = f64::from(burst) + (now - begin).as_secs_f64() * per_second;
            prop_assert!(f64::from(passed) <= most + 1e-6, "{passed} of {most}");
        }
    }

    /// A caller that waits for the returned time gets a token.
    #[test]
    fn the_returned_wait_suffices(per_second in 0.01_f64..1000.0, burst in 1_u32..5) {
        let mut now = Instant::now();
        let mut bucket = Bucket::full(Rate { per_second, burst }, now);
        for _ in 0..20 {
            if let Err(wait) = pass(&mut bucket, now) {
                // Adds the nanosecond lost to rounding.
                now += wait + Duration::from_nanos(1);
                prop_assert_eq!(pass(&mut bucket, now), Ok(()));
            }
        }
    }
}

fn counted(requests: &Requests) -> String {
    let mut registry = Registry::default();
    requests.register(&mut registry);
    let mut text = String::new();
    encode(&mut text, &registry).unwrap();
    text
}

#[tokio::test]
async fn calls_beyond_the_burst_wait() {
    let requests = Requests::default();
    let mut service = ServiceBuilder::new()
        .layer(TransportLayer::new(
            Rate::of(0.000_1, 2),
            requests.clone(),
            "api:6443",
        ))
        .service(service_fn(|_: Request<()>| async {
            Ok::<_, Infallible>(Response::builder().status(201).body(()).unwrap())
        }));
    for _ in 0..2 {
        let post = Request::post("/").body(()).unwrap();
        let answer = service.ready().await.unwrap().call(post).await.unwrap();
        assert_eq!(answer.status(), 201);
    }
    assert!(futures::poll!(service.ready().boxed()).is_pending());
    let line = r#"rest_client_requests_total{code="201",method="POST",host="api:6443"} 2"#;
    assert!(counted(&requests).contains(line), "{}", counted(&requests));
}

#[tokio::test]
async fn a_call_without_an_answer_is_counted_as_an_error() {
    let requests = Requests::default();
    let service = ServiceBuilder::new()
        .layer(TransportLayer::new(None, requests.clone(), "api"))
        .service(service_fn(|_: Request<()>| async {
            Err::<Response<()>, _>("no route")
        }));
    service.oneshot(Request::new(())).await.unwrap_err();
    let line = r#"rest_client_requests_total{code="<error>",method="GET",host="api"} 1"#;
    assert!(counted(&requests).contains(line), "{}", counted(&requests));
}
