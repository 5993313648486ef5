//! State of a client of a program that counts its questions, and the check of an answer. Pure.
//!
//! Each start of the program draws memory and names itself by the memory's digest: its life. Each
//! question adds one to its counter. So an answer says which memory counted, and how far. A counter
//! that goes back, or a life that had ended, is an older state of the sandbox. A counter that has
//! grown by more than the questions has counted a question twice.

use std::collections::HashSet;

/// Answer of the program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    pub life: String,
    pub counter: u64,
}

impl Answer {
    /// Parses `<life> <counter>`, as counter.py writes it.
    pub fn parse(line: &str) -> Option<Self> {
        let (life, counter) = line.trim().split_once(' ')?;
        Some(Self {
            life: life.to_owned(),
            counter: counter.parse().ok()?,
        })
    }
}

/// Result of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// The same life continues.
    Continued,
    /// The program has started anew, which was allowed.
    StartedAnew,
}

/// Fault that must never happen.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Loss {
    #[error("time went back: life {life} had counted {before}, now it is at {now}")]
    WentBack { life: String, before: u64, now: u64 },
    #[error("time went back: life {life} had ended, and is here again at {now}")]
    CameBack { life: String, now: u64 },
    #[error("memory was lost: life {before} had counted {counted}, now there is {after}")]
    Lost {
        before: String,
        counted: u64,
        after: String,
    },
    #[error("counted more than was asked: {now} where at most {most} are possible")]
    CountedTwice { most: u64, now: u64 },
}

/// State of one client of one sandbox.
#[derive(Debug, Clone, Default)]
pub struct Counting {
    now: Option<Answer>,
    ended: HashSet<String>,
    /// Number of questions without an answer: each may have been counted, or may still be.
    open: u64,
}

impl Counting {
    /// Records a question that is about to be sent.
    pub fn record_question(&mut self) {
        self.open += 1;
    }

    /// Checks an answer. `may_start_anew`: a kill may have hit the sandbox while it was awake.
    pub fn check(&mut self, answer: Answer, may_start_anew: bool) -> Result<Progress, Loss> {
        let (life, now) = (answer.life.clone(), answer.counter);
        if self.ended.contains(&life) {
            return Err(Loss::CameBack { life, now });
        }
        let (progress, before) = match &self.now {
            Some(known) if known.life == life => (Progress::Continued, known.counter),
            Some(known) if !may_start_anew => {
                return Err(Loss::Lost {
                    before: known.life.clone(),
                    counted: known.counter,
                    after: life,
                });
            }
            Some(known) => {
                self.ended.insert(known.life.clone());
                (Progress::StartedAnew, 0)
            }
            None => (Progress::StartedAnew, 0),
        };
        if now <= before {
            return Err(Loss::WentBack { life, before, now });
        }
        let most = before + self.open;
        if now > most {
            return Err(Loss::CountedTwice { most, now });
        }
        self.open -= now - before;
        self.now = Some(answer);
        Ok(progress)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(
        counting: &mut Counting,
        life: &str,
        counter: u64,
        anew: bool,
    ) -> Result<Progress, Loss> {
        let life = life.to_owned();
        counting.check(Answer { life, counter }, anew)
    }

    fn asked(times: u64) -> Counting {
        let mut counting = Counting::default();
        (0..times).for_each(|_| counting.record_question());
        counting
    }

    #[test]
    fn a_counter_goes_on_also_when_answers_were_missed() {
        let mut counting = asked(1);
        assert_eq!(
            check(&mut counting, "a", 1, false),
            Ok(Progress::StartedAnew)
        );
        counting.record_question();
        counting.record_question();
        counting.record_question();
        // One question has not arrived.
        assert_eq!(check(&mut counting, "a", 3, false), Ok(Progress::Continued));
        // The late question is counted after all.
        counting.record_question();
        assert_eq!(check(&mut counting, "a", 5, false), Ok(Progress::Continued));
    }

    #[test]
    fn a_counter_that_stands_still_or_goes_back_is_an_older_state() {
        let mut counting = asked(3);
        assert_eq!(
            check(&mut counting, "a", 3, false),
            Ok(Progress::StartedAnew)
        );
        for now in [1, 2, 3] {
            counting.record_question();
            let went_back = Loss::WentBack {
                life: "a".to_owned(),
                before: 3,
                now,
            };
            assert_eq!(check(&mut counting, "a", now, true), Err(went_back));
        }
    }

    #[test]
    fn a_counter_that_runs_ahead_has_counted_twice() {
        let mut counting = asked(2);
        assert_eq!(
            check(&mut counting, "a", 2, false),
            Ok(Progress::StartedAnew)
        );
        counting.record_question();
        let twice = Loss::CountedTwice { most: 3, now: 4 };
        assert_eq!(check(&mut counting, "a", 4, false), Err(twice));
    }

    #[test]
    fn another_life_is_a_loss_unless_it_was_killed_awake_and_the_first_never_comes_back() {
        let mut counting = asked(5);
        assert_eq!(
            check(&mut counting, "a", 5, false),
            Ok(Progress::StartedAnew)
        );
        counting.record_question();
        let forgotten = Loss::Lost {
            before: "a".to_owned(),
            counted: 5,
            after: "b".to_owned(),
        };
        assert_eq!(check(&mut counting, "b", 1, false), Err(forgotten));
        assert_eq!(
            check(&mut counting, "b", 1, true),
            Ok(Progress::StartedAnew)
        );
        counting.record_question();
        let back = Loss::CameBack {
            life: "a".to_owned(),
            now: 6,
        };
        assert_eq!(check(&mut counting, "a", 6, true), Err(back));
    }

    #[test]
    fn a_line_is_a_life_and_a_number() {
        let answer = Answer {
            life: "c0ffee".to_owned(),
            counter: 12,
        };
        assert_eq!(Answer::parse("c0ffee 12\n"), Some(answer));
        assert_eq!(Answer::parse("c0ffee"), None);
        assert_eq!(Answer::parse("c0ffee -1"), None);
    }
}
