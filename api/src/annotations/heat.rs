//! Heat of a warm pool, by the annotation `torpor.dev/heat`.

use super::{HEAT, InvalidAnnotation, values::invalid};

/// How many members of a pool run; the others sleep.
///
/// Syntax: `hot=N,asleep=rest` or `hot=rest`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heat {
    /// All members run.
    AllHot,
    /// At least this many members run, and the others sleep.
    Hot(usize),
}

impl Heat {
    const ALLOWED: &str = "hot=rest, or hot=N,asleep=rest with a number N from 0 to 10000";
    const MOST: usize = 10_000;

    /// Parses the annotation's value.
    pub fn parse(value: &str) -> Result<Self, InvalidAnnotation> {
        if value == "hot=rest" {
            return Ok(Self::AllHot);
        }
        let hot = value
            .strip_prefix("hot=")
            .and_then(|rest| rest.strip_suffix(",asleep=rest"))
            .filter(|number| number.bytes().all(|byte| byte.is_ascii_digit()))
            .and_then(|number| number.parse().ok());
        hot.filter(|hot| *hot <= Self::MOST)
            .map(Self::Hot)
            .ok_or_else(|| invalid(HEAT, value, Self::ALLOWED))
    }

    /// Returns how many of `members` run at least.
    pub fn hot_of(self, members: usize) -> usize {
        match self {
            Self::AllHot => members,
            Self::Hot(hot) => hot.min(members),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_heat_sets_the_number_of_members_that_run() {
        for (value, members, hot) in [
            ("hot=rest", 7, 7),
            ("hot=2,asleep=rest", 7, 2),
            ("hot=0,asleep=rest", 7, 0),
            ("hot=9,asleep=rest", 7, 7),
        ] {
            assert_eq!(Heat::parse(value).unwrap().hot_of(members), hot, "{value}");
        }
    }

    #[test]
    fn a_value_of_another_form_is_named_with_the_allowed_ones() {
        for value in [
            "",
            "hot",
            "hot=2",
            "hot=-1,asleep=rest",
            "hot=+1,asleep=rest",
            "hot=2, asleep=rest",
            "hot=99999999999999999999,asleep=rest",
            "hot=10001,asleep=rest",
            "asleep=rest",
        ] {
            let error = Heat::parse(value).unwrap_err().to_string();
            assert!(error.contains("torpor.dev/heat"), "{error}");
            assert!(error.contains("hot=N,asleep=rest"), "{error}");
        }
    }
}
