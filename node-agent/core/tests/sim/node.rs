//! The world's sandbox for [`torpor_core::transition`]: what the shim's commands do on a node,
//! where each act can fail or be the last one of its process.

use std::cell::{Cell, RefCell};

use torpor_core::transition::{
    Awake, Holding, Left, Origin, Pause, Paused, Recorded, Refusal, Sandbox,
};
use torpor_core::{Entry, ImageId, ImageState, LedgerState, Live};

use crate::agent::Faults;
use crate::schedule::Random;
use crate::world::World;

/// Why an act of a process did not end well.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The process was killed.
    Died,
    Failed(&'static str),
    Refused(Refusal),
    /// The sandbox ended before it received the call.
    NotReceived,
    Fenced,
}

/// The sandbox, for one process.
pub(crate) struct NodeSandbox<'a> {
    world: RefCell<&'a mut World>,
    random: RefCell<&'a mut Random>,
    faults: Faults,
    /// It crashed while awake, and its user wants it as it was in its last image.
    goes_back: bool,
    /// The process was killed: it does nothing any more.
    dead: Cell<bool>,
}

impl<'a> NodeSandbox<'a> {
    pub(crate) fn new(world: &'a mut World, random: &'a mut Random, faults: Faults) -> Self {
        Self {
            world: world.into(),
            random: random.into(),
            faults,
            goes_back: false,
            dead: Cell::new(false),
        }
    }

    pub(crate) fn going_back(self) -> Self {
        Self {
            goes_back: true,
            ..self
        }
    }

    fn may_die(&self) -> Result<(), Fault> {
        if !self.dead.get() && self.random.borrow_mut().chance(self.faults.die) {
            self.dead.set(true);
        }
        match self.dead.get() {
            true => Err(Fault::Died),
            false => Ok(()),
        }
    }

    fn may_fail(&self) -> Result<(), Fault> {
        match self.random.borrow_mut().chance(self.faults.fail) {
            true => Err(Fault::Failed("Injected")),
            false => Ok(()),
        }
    }
}

impl Paused for NodeSandbox<'_> {
    type Error = Fault;

    fn is_paused(&self) -> Result<bool, Fault> {
        self.may_fail()?;
        Ok(self.world.borrow().live == Live::Paused)
    }

    fn has_gofers(&self) -> Result<bool, Fault> {
        self.may_fail()?;
        Ok(self.world.borrow().gofers)
    }

    fn let_run(&self) -> Result<bool, Fault> {
        self.may_die()?;
        if self.random.borrow_mut().chance(self.faults.fail) {
            self.world.borrow_mut().ends_unheard();
            return Err(Fault::NotReceived);
        }
        self.world.borrow_mut().resumes();
        self.may_die()?;
        let mut world = self.world.borrow_mut();
        if world.doze.take().is_some() {
            world.say("doze resumed", String::new);
        }
        Ok(true)
    }

    fn never_ran(error: &Fault) -> bool {
        *error == Fault::NotReceived
    }

    fn take_back(&self, left: &Left) -> Result<(), Fault> {
        let image = left.image.clone();
        self.append_at(left.seq, &Entry::Committed { image })?;
        self.world.borrow_mut().takes_back(&left.image);
        Ok(())
    }
}

impl Sandbox for NodeSandbox<'_> {
    fn recorded(&self) -> Result<Recorded, Fault> {
        Ok(match self.world.borrow().record.clone() {
            Some(image) => Recorded::Hibernated {
                image,
                unstarted: self.world.borrow().unstarted.then_some(Origin::Own),
            },
            None => Recorded::Running,
        })
    }

    fn ledger(&self) -> Result<LedgerState, Fault> {
        Ok(self.world.borrow().ledger().clone())
    }

    fn holding(&self, image: &ImageId) -> Holding {
        match self.world.borrow().images.get(image) {
            Some(found) if found.state == ImageState::Committed => Holding::Held,
            _ => Holding::Missing,
        }
    }

    fn pause(&self) -> Result<Option<Pause>, Fault> {
        let world = self.world.borrow();
        let kind = match world.doze {
            Some(_) => Pause::Doze,
            None => Pause::Other,
        };
        Ok((world.live == Live::Paused).then_some(kind))
    }

    fn is_held_open(&self) -> Result<bool, Fault> {
        Ok(self.world.borrow().containers)
    }

    fn is_suspended(&self) -> Result<bool, Fault> {
        Ok(false)
    }

    fn append(&self, entry: &Entry) -> Result<u64, Fault> {
        let was_dead = self.dead.get();
        if self.may_die().is_err() {
            if !was_dead {
                let cut = self.random.borrow_mut().pick(4096);
                self.world.borrow_mut().append(entry, Some(cut));
            }
            return Err(Fault::Died);
        }
        let mut world = self.world.borrow_mut();
        match world.append(entry, None) {
            true => Ok(world.ledger().seq),
            false => Err(Fault::Failed("DiskFull")),
        }
    }

    fn append_at(&self, seq: u64, entry: &Entry) -> Result<(), Fault> {
        if self.world.borrow().ledger().seq != seq {
            return Err(Fault::Fenced);
        }
        self.append(entry).map(drop)
    }

    fn is_fenced(error: &Fault) -> bool {
        *error == Fault::Fenced
    }

    fn end(&self, image: &ImageId) -> Result<(), Fault> {
        self.may_die()?;
        self.world.borrow_mut().begins_end(image);
        self.may_die()?;
        self.world.borrow_mut().ends();
        Ok(())
    }

    fn is_final(_: &Fault) -> bool {
        false
    }

    // The world has one Pod, whose images are its own.
    fn copy(&self, image: &ImageId) -> Result<ImageId, Fault> {
        panic!("{image} is no golden one")
    }

    fn sleep_unstarted(&self, image: &ImageId, _: Origin) -> Result<(), Fault> {
        self.may_die()?;
        self.world.borrow_mut().sleeps_unstarted(image);
        self.may_die()
    }

    fn start_cold(&self, image: &ImageId, _: &Fault) -> Result<(), Fault> {
        panic!("{image} is the only memory")
    }

    fn take(&self, image: &ImageId) -> Result<(), Fault> {
        panic!("{image} is no other Pod's")
    }

    fn give_back(&self, image: &ImageId) -> Result<(), Fault> {
        panic!("{image} is no other Pod's")
    }

    fn open(&self, image: &ImageId) -> Result<(), Fault> {
        match self.holding(image) {
            Holding::Held => Ok(()),
            Holding::Unreadable | Holding::Missing => Err(Fault::Failed("ImageMissing")),
        }
    }

    fn restore(&self, image: &ImageId, awake: &Awake<'_, Fault>) -> Result<(), Fault> {
        self.may_die()?;
        self.may_fail()?;
        {
            let mut world = self.world.borrow_mut();
            if self.goes_back {
                world.leaves_behind(image);
            }
            world.removes_remains();
            world.restores(image);
            world.containers = true;
        }
        self.may_die()?;
        match awake(&|| ()) {
            Ok(()) => {}
            Err(Fault::Died) => return Err(Fault::Died),
            Err(error) => {
                self.world.borrow_mut().dies();
                return Err(error);
            }
        }
        self.may_die()?;
        self.world.borrow_mut().wakes();
        Ok(())
    }

    fn renew(&self, release: &dyn Fn()) -> Result<(), Fault> {
        release();
        Ok(())
    }

    fn report(&self) -> Result<(), Fault> {
        Ok(())
    }

    fn reason(_: &Fault) -> String {
        "Injected".to_owned()
    }

    fn catch_up(&self) -> Result<(), Fault> {
        self.may_die()?;
        let mut world = self.world.borrow_mut();
        world.say("caught up", String::new);
        world.wakes();
        if world.live == Live::None {
            world.containers = false;
        }
        Ok(())
    }

    fn refuse(refusal: Refusal) -> Fault {
        Fault::Refused(refusal)
    }
}
