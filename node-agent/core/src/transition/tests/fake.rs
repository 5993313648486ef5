//! A sandbox in memory for the tests of its transitions.

use std::cell::RefCell;

use super::*;

/// An error of the fake sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Fault {
    Refused(Refusal),
    /// The sandbox ended before it received the call.
    NotReceived,
    /// The call may have had its effect.
    Unknown,
    Fenced,
    RestoreFailed,
}

/// A sandbox in memory, which records the acts.
pub(super) struct Fake {
    pub(super) recorded: Recorded,
    pub(super) entries: RefCell<Vec<Entry>>,
    pub(super) holding: Holding,
    pub(super) pause: RefCell<Option<Pause>>,
    pub(super) gofers: RefCell<Vec<Result<bool, Fault>>>,
    pub(super) held_open: bool,
    pub(super) suspended: bool,
    pub(super) resumes: Result<bool, Fault>,
    pub(super) restores: Result<(), Fault>,
    /// Another sandbox of the Pod appends to the ledger while this one is restored.
    pub(super) overtaken: bool,
    pub(super) acts: RefCell<Vec<String>>,
}

impl Fake {
    pub(super) fn new(recorded: Recorded, entries: Vec<Entry>, pause: Option<Pause>) -> Self {
        Self {
            recorded,
            entries: entries.into(),
            holding: Holding::Held,
            pause: pause.into(),
            gofers: Vec::new().into(),
            held_open: true,
            suspended: false,
            resumes: Ok(true),
            restores: Ok(()),
            overtaken: false,
            acts: RefCell::default(),
        }
    }

    pub(super) fn dozing() -> Self {
        Self::new(Recorded::Running, saved(), Some(Pause::Doze))
    }

    pub(super) fn hibernated() -> Self {
        Self::new(
            Recorded::Hibernated {
                image: image(1),
                unstarted: None,
            },
            asleep(),
            None,
        )
    }

    pub(super) fn act(&self, act: impl Into<String>) {
        self.acts.borrow_mut().push(act.into());
    }

    pub(super) fn acts(&self) -> Vec<String> {
        self.acts.borrow().clone()
    }

    pub(super) fn memory(&self) -> Memory {
        ledger_of(&self.entries.borrow()).memory
    }

    pub(super) fn seq(&self) -> u64 {
        ledger_of(&self.entries.borrow()).seq
    }
}

impl Paused for Fake {
    type Error = Fault;

    fn is_paused(&self) -> Result<bool, Fault> {
        Ok(self.pause.borrow().is_some())
    }

    fn has_gofers(&self) -> Result<bool, Fault> {
        let mut answers = self.gofers.borrow_mut();
        match answers.is_empty() {
            true => Ok(true),
            false => answers.remove(0),
        }
    }

    fn let_run(&self) -> Result<bool, Fault> {
        self.act("resumed");
        self.resumes.clone()
    }

    fn never_ran(error: &Fault) -> bool {
        *error == Fault::NotReceived
    }

    fn take_back(&self, left: &Left) -> Result<(), Fault> {
        let image = left.image.clone();
        self.append_at(left.seq, &Entry::Committed { image })
    }
}

impl Sandbox for Fake {
    fn recorded(&self) -> Result<Recorded, Fault> {
        Ok(self.recorded.clone())
    }

    fn ledger(&self) -> Result<LedgerState, Fault> {
        Ok(ledger_of(&self.entries.borrow()))
    }

    fn holding(&self, _: &ImageId) -> Holding {
        self.holding
    }

    fn pause(&self) -> Result<Option<Pause>, Fault> {
        Ok(*self.pause.borrow())
    }

    fn is_held_open(&self) -> Result<bool, Fault> {
        Ok(self.held_open)
    }

    fn is_suspended(&self) -> Result<bool, Fault> {
        Ok(self.suspended)
    }

    fn append(&self, entry: &Entry) -> Result<u64, Fault> {
        self.entries.borrow_mut().push(entry.clone());
        Ok(self.seq())
    }

    fn append_at(&self, seq: u64, entry: &Entry) -> Result<(), Fault> {
        match self.seq() == seq {
            true => self.append(entry).map(drop),
            false => Err(Fault::Fenced),
        }
    }

    fn is_fenced(error: &Fault) -> bool {
        *error == Fault::Fenced
    }

    fn end(&self, _: &ImageId) -> Result<(), Fault> {
        self.act("ended");
        self.pause.replace(None);
        Ok(())
    }

    fn copy(&self, of: &ImageId) -> Result<ImageId, Fault> {
        assert_eq!(*of, other());
        self.act("copied");
        Ok(image(1))
    }

    fn sleep_unstarted(&self, _: &ImageId, origin: Origin) -> Result<(), Fault> {
        self.act(format!("sleeps, {origin:?}"));
        Ok(())
    }

    fn start_cold(&self, _: &ImageId, _: &Fault) -> Result<(), Fault> {
        self.append(&Entry::Awake)?;
        self.act("starts cold");
        Ok(())
    }

    fn is_final(error: &Fault) -> bool {
        *error == Fault::RestoreFailed
    }

    fn take(&self, _: &ImageId) -> Result<(), Fault> {
        self.act("taken");
        Ok(())
    }

    fn give_back(&self, _: &ImageId) -> Result<(), Fault> {
        self.act("given back");
        Ok(())
    }

    fn open(&self, _: &ImageId) -> Result<(), Fault> {
        Ok(())
    }

    fn restore(&self, _: &ImageId, awake: &Awake<'_, Fault>) -> Result<(), Fault> {
        self.act("restored");
        if self.overtaken {
            self.append(&Entry::Waking { image: image(1) })?;
        }
        self.restores.clone()?;
        awake(&|| self.act("released"))
    }

    fn renew(&self, release: &dyn Fn()) -> Result<(), Fault> {
        self.act("renewed");
        release();
        Ok(())
    }

    fn report(&self) -> Result<(), Fault> {
        self.act("reported");
        Ok(())
    }

    fn reason(_: &Fault) -> String {
        "RestoreFailed".to_owned()
    }

    fn catch_up(&self) -> Result<(), Fault> {
        self.act("caught up");
        Ok(())
    }

    fn refuse(refusal: Refusal) -> Fault {
        Fault::Refused(refusal)
    }
}
