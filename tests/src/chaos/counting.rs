//! What a client knows of a program that counts its questions, and what an answer tells it. Pure.
//!
//! Each start of the program draws memory and calls itself by its digest: its life. Each question adds one to its counter.
//! So an answer says which memory counted, and how far. A counter that goes back, or a life that had ended, is an older
//! state of the sandbox; a counter that has grown by more than was asked has counted something twice.

use std::collections::HashSet;

/// What the program says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    pub life: String,
    pub counter: u64,
}

impl Answer {
    /// `<life> <counter>`, as counter.py writes it.
    pub fn parse(line: &str) -> Option<Self> {
        let (life, counter) = line.trim().split_once(' ')?;
        Some(Self {
            life: life.to_owned(),
            counter: counter.parse().ok()?,
        })
    }
}

/// What an answer tells a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum News {
    /// The same life, gone on.
    GoneOn,
    /// The program was started anew, which it might be.
    StartedAnew,
}

/// What must never happen.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Loss {
    #[error("time went back: life {life} had counted {before}, now it is at {now}")]
    WentBack { life: String, before: u64, now: u64 },
    #[error("time went back: life {life} had ended, and is here again at {now}")]
    CameBack { life: String, now: u64 },
    #[error("memory was lost: life {before} had counted {counted}, now there is {after}")]
    Forgotten {
        before: String,
        counted: u64,
        after: String,
    },
    #[error("counted more than was asked: {now} where at most {most} are possible")]
    CountedTwice { most: u64, now: u64 },
}

/// One client's memory of one sandbox.
#[derive(Debug, Clone, Default)]
pub struct Counting {
    now: Option<Answer>,
    ended: HashSet<String>,
    /// Questions that were not answered: each may have been counted, or may still be.
    open: u64,
}

impl Counting {
    /// Before a question is sent.
    pub fn asks(&mut self) {
        self.open += 1;
    }

    /// An answer has come. `may_start_anew`: something was killed while the sandbox was awake.
    pub fn hears(&mut self, answer: Answer, may_start_anew: bool) -> Result<News, Loss> {
        let (life, now) = (answer.life.clone(), answer.counter);
        if self.ended.contains(&life) {
            return Err(Loss::CameBack { life, now });
        }
        let (news, before) = match &self.now {
            Some(known) if known.life == life => (News::GoneOn, known.counter),
            Some(known) if !may_start_anew => {
                return Err(Loss::Forgotten {
                    before: known.life.clone(),
                    counted: known.counter,
                    after: life,
                });
            }
            Some(known) => {
                self.ended.insert(known.life.clone());
                (News::StartedAnew, 0)
            }
            None => (News::StartedAnew, 0),
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
        Ok(news)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hears(counting: &mut Counting, life: &str, counter: u64, anew: bool) -> Result<News, Loss> {
        let life = life.to_owned();
        counting.hears(Answer { life, counter }, anew)
    }

    fn asked(times: u64) -> Counting {
        let mut counting = Counting::default();
        (0..times).for_each(|_| counting.asks());
        counting
    }

    #[test]
    fn a_counter_goes_on_also_when_answers_were_missed() {
        let mut counting = asked(1);
        assert_eq!(hears(&mut counting, "a", 1, false), Ok(News::StartedAnew));
        counting.asks();
        counting.asks();
        counting.asks();
        // One question was lost on the way.
        assert_eq!(hears(&mut counting, "a", 3, false), Ok(News::GoneOn));
        // And was counted after all.
        counting.asks();
        assert_eq!(hears(&mut counting, "a", 5, false), Ok(News::GoneOn));
    }

    #[test]
    fn a_counter_that_stands_still_or_goes_back_is_an_older_state() {
        let mut counting = asked(3);
        assert_eq!(hears(&mut counting, "a", 3, false), Ok(News::StartedAnew));
        for now in [1, 2, 3] {
            counting.asks();
            let went_back = Loss::WentBack {
                life: "a".to_owned(),
                before: 3,
                now,
            };
            assert_eq!(hears(&mut counting, "a", now, true), Err(went_back));
        }
    }

    #[test]
    fn a_counter_that_runs_ahead_has_counted_twice() {
        let mut counting = asked(2);
        assert_eq!(hears(&mut counting, "a", 2, false), Ok(News::StartedAnew));
        counting.asks();
        let twice = Loss::CountedTwice { most: 3, now: 4 };
        assert_eq!(hears(&mut counting, "a", 4, false), Err(twice));
    }

    #[test]
    fn another_life_is_a_loss_unless_it_was_killed_awake_and_the_first_never_comes_back() {
        let mut counting = asked(5);
        assert_eq!(hears(&mut counting, "a", 5, false), Ok(News::StartedAnew));
        counting.asks();
        let forgotten = Loss::Forgotten {
            before: "a".to_owned(),
            counted: 5,
            after: "b".to_owned(),
        };
        assert_eq!(hears(&mut counting, "b", 1, false), Err(forgotten));
        assert_eq!(hears(&mut counting, "b", 1, true), Ok(News::StartedAnew));
        counting.asks();
        let back = Loss::CameBack {
            life: "a".to_owned(),
            now: 6,
        };
        assert_eq!(hears(&mut counting, "a", 6, true), Err(back));
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
