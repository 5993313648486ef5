//! Conditions and ranges of a request for a file, as Go's `http.ServeContent` handles them for a
//! file without an ETag. Pure.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use http::{HeaderMap, header};

/// Maximum number of ranges of a request; with more, the whole file is sent.
const MAX_RANGES: usize = 64;
/// Start of the year 10000, since 1970: a date in a header has a year of four digits.
const END_OF_DATES: Duration = Duration::from_secs(253_402_300_800);

/// Range of a file, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    pub start: u64,
    /// Length, at least 1.
    pub length: u64,
}

/// Kind of answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    Whole,
    /// One range or several.
    Parts(Vec<Span>),
    NotModified,
    PreconditionFailed,
    NotSatisfiable(Invalid),
}

/// Unusable header `Range`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Invalid {
    #[error("invalid range")]
    Malformed,
    #[error("invalid range: failed to overlap")]
    NoOverlap,
}

impl Span {
    /// Returns the value of `Content-Range`.
    pub fn header(&self, size: u64) -> String {
        let last = self.start + self.length - 1;
        format!("bytes {}-{last}/{size}", self.start)
    }
}

/// Returns the answer for a file with this time of its last change and this size in bytes.
pub fn choose(headers: &HeaderMap, modified: SystemTime, size: u64) -> Content {
    let get = |name| headers.get(name).and_then(|value| value.to_str().ok());
    let date = |name| get(name).and_then(|value| httpdate::parse_http_date(value).ok());
    let modified = in_seconds(modified);
    // The file has no ETag, so that only `*` matches.
    let failed = match get(header::IF_MATCH) {
        Some(tags) => tags.trim() != "*",
        None => date(header::IF_UNMODIFIED_SINCE).is_some_and(|since| modified > since),
    };
    if failed {
        return Content::PreconditionFailed;
    }
    let fresh = match get(header::IF_NONE_MATCH) {
        Some(tags) => tags.trim() == "*",
        None => date(header::IF_MODIFIED_SINCE).is_some_and(|since| modified <= since),
    };
    if fresh {
        return Content::NotModified;
    }
    let changed =
        headers.contains_key(header::IF_RANGE) && date(header::IF_RANGE) != Some(modified);
    let Some(range) = get(header::RANGE).filter(|_| !changed) else {
        return Content::Whole;
    };
    match parse(range, size) {
        // An empty file is sent whole: a client that reads a growing file gets no error.
        Err(Invalid::NoOverlap) if size == 0 => Content::Whole,
        Err(invalid) => Content::NotSatisfiable(invalid),
        Ok(spans) => {
            let total: u64 = spans.iter().map(|span| span.length).sum();
            if spans.is_empty() || spans.len() > MAX_RANGES || total > size {
                Content::Whole
            } else {
                Content::Parts(spans)
            }
        }
    }
}

/// Returns the value of `Last-Modified`.
///
/// The result is `None` for a time before 1970 or after 9999, at which `httpdate` panics.
pub fn last_modified(modified: SystemTime) -> Option<String> {
    let since = modified.duration_since(UNIX_EPOCH).ok()?;
    (since < END_OF_DATES).then(|| httpdate::fmt_http_date(modified))
}

/// Cuts off fractions of seconds, which headers do not have.
fn in_seconds(time: SystemTime) -> SystemTime {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    UNIX_EPOCH + Duration::from_secs(since.as_secs())
}

fn parse(range: &str, size: u64) -> Result<Vec<Span>, Invalid> {
    let ranges = range.strip_prefix("bytes=").ok_or(Invalid::Malformed)?;
    // Rust's parser also accepts a plus sign.
    let number = |text: &str| match text.starts_with('+') {
        false => text.parse::<u64>().map_err(|_| Invalid::Malformed),
        true => Err(Invalid::Malformed),
    };
    let (mut spans, mut outside) = (Vec::new(), false);
    for range in ranges.split(',').map(str::trim).filter(|r| !r.is_empty()) {
        let (first, last) = range.split_once('-').ok_or(Invalid::Malformed)?;
        let (start, end) = match (first.trim(), last.trim()) {
            ("", last) => (size - number(last)?.min(size), size),
            (first, "") => (number(first)?, size),
            (first, last) => {
                let (first, last) = (number(first)?, number(last)?);
                if first > last {
                    return Err(Invalid::Malformed);
                }
                (first, last.saturating_add(1).min(size))
            }
        };
        if start < end {
            let length = end - start;
            spans.push(Span { start, length });
        } else {
            outside = true;
        }
    }
    if spans.is_empty() && outside {
        return Err(Invalid::NoOverlap);
    }
    Ok(spans)
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;
    use rstest::rstest;

    use super::*;

    const EARLIER: &str = "Sun, 06 Nov 1994 08:49:36 GMT";
    const THEN: &str = "Sun, 06 Nov 1994 08:49:37 GMT";

    fn asked(headers: &[(&'static str, &str)], size: u64) -> Content {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.insert(*name, HeaderValue::from_str(value).unwrap());
        }
        let modified = UNIX_EPOCH + Duration::new(784_111_777, 5);
        choose(&map, modified, size)
    }

    fn part(start: u64, length: u64) -> Content {
        Content::Parts(vec![Span { start, length }])
    }

    #[rstest]
    #[case("bytes=0-4", part(0, 5))]
    #[case("bytes=5-", part(5, 5))]
    #[case("bytes=-3", part(7, 3))]
    #[case("bytes=-30", part(0, 10))]
    #[case("bytes=8-99", part(8, 2))]
    #[case("bytes= 1 - 2 , ", part(1, 2))]
    #[case("bytes=0-18446744073709551615", part(0, 10))]
    #[case("bytes=99-,1-1", part(1, 1))]
    #[case("bytes=0-0,9-9", Content::Parts(vec![Span { start: 0, length: 1 }, Span { start: 9, length: 1 }]))]
    #[case("bytes=0-9,0-9", Content::Whole)]
    #[case("bytes=,", Content::Whole)]
    #[case("bytes=10-", Content::NotSatisfiable(Invalid::NoOverlap))]
    #[case("bytes=-0", Content::NotSatisfiable(Invalid::NoOverlap))]
    #[case("bytes=2-1", Content::NotSatisfiable(Invalid::Malformed))]
    #[case("bytes=a-", Content::NotSatisfiable(Invalid::Malformed))]
    #[case("bytes=--1", Content::NotSatisfiable(Invalid::Malformed))]
    #[case("bytes=-", Content::NotSatisfiable(Invalid::Malformed))]
    #[case("bytes=+1-", Content::NotSatisfiable(Invalid::Malformed))]
    #[case("bytes=1", Content::NotSatisfiable(Invalid::Malformed))]
    #[case("lines=1-2", Content::NotSatisfiable(Invalid::Malformed))]
    #[case(
        "bytes=99999999999999999999-",
        Content::NotSatisfiable(Invalid::Malformed)
    )]
    fn ranges_have_gos_semantics(#[case] range: &str, #[case] expected: Content) {
        assert_eq!(asked(&[("range", range)], 10), expected);
    }

    #[test]
    fn an_empty_file_and_too_many_ranges_are_sent_whole() {
        assert_eq!(asked(&[("range", "bytes=0-10")], 0), Content::Whole);
        let many = format!("bytes={}", "0-0,".repeat(MAX_RANGES + 1));
        assert_eq!(asked(&[("range", &many)], 1000), Content::Whole);
    }

    #[rstest]
    #[case(&[("if-modified-since", THEN)], Content::NotModified)]
    #[case(&[("if-modified-since", EARLIER)], Content::Whole)]
    #[case(&[("if-modified-since", "soon")], Content::Whole)]
    #[case(&[("if-none-match", "*")], Content::NotModified)]
    #[case(&[("if-none-match", "\"a\""), ("if-modified-since", THEN)], Content::Whole)]
    #[case(&[("if-unmodified-since", THEN)], Content::Whole)]
    #[case(&[("if-unmodified-since", EARLIER)], Content::PreconditionFailed)]
    #[case(&[("if-match", "*"), ("if-unmodified-since", EARLIER)], Content::Whole)]
    #[case(&[("if-match", "\"a\"")], Content::PreconditionFailed)]
    #[case(&[("if-range", THEN), ("range", "bytes=1-1")], part(1, 1))]
    #[case(&[("if-range", EARLIER), ("range", "bytes=1-1")], Content::Whole)]
    #[case(&[("if-range", "\"a\""), ("range", "bytes=1-1")], Content::Whole)]
    fn conditions_have_gos_semantics(
        #[case] headers: &[(&'static str, &str)],
        #[case] expected: Content,
    ) {
        assert_eq!(asked(headers, 10), expected);
    }

    #[test]
    fn a_time_outside_of_the_range_of_headers_is_left_out() {
        let at = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
        let header = last_modified;
        assert_eq!(header(at(784_111_777)).as_deref(), Some(THEN));
        let first = "Thu, 01 Jan 1970 00:00:00 GMT";
        assert_eq!(header(UNIX_EPOCH).as_deref(), Some(first));
        let last = "Fri, 31 Dec 9999 23:59:59 GMT";
        assert_eq!(header(at(253_402_300_799)).as_deref(), Some(last));
        for modified in [at(253_402_300_800), UNIX_EPOCH - Duration::from_nanos(1)] {
            assert_eq!(header(modified), None);
        }
    }

    proptest::proptest! {
        #[test]
        fn a_span_is_within_the_file(range in "bytes=[0-9,-]{0,20}", size in 0_u64..100) {
            if let Content::Parts(spans) = asked(&[("range", &range)], size) {
                assert!(!spans.is_empty());
                for span in spans {
                    assert!(span.length > 0 && span.start + span.length <= size);
                }
            }
        }
    }
}
