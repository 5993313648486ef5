//! BPF instructions in the kernel's layout, and programs with named jump targets.

use std::os::fd::RawFd;

/// One instruction.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Instruction {
    code: u8,
    registers: u8,
    offset: i16,
    immediate: i32,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Register {
    R0,
    R1,
    R2,
    R3,
    R4,
    R5,
    R6,
    R7,
    R8,
    R9,
    R10,
}

/// Functions of the kernel that a program may call.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Helper {
    MapLookupElem = 1,
    MapUpdateElem = 2,
    MapDeleteElem = 3,
    KtimeGetNs = 5,
    SkbLoadBytesRelative = 68,
    SkRelease = 86,
    SkAssign = 124,
}

use Register::R0;

fn instruction(code: u8, to: Register, from: Register, offset: i16, immediate: i32) -> Instruction {
    // The two bit fields in one byte follow the machine's byte order, as in C.
    let (to, from) = (to as u8, from as u8);
    let registers = if cfg!(target_endian = "little") {
        from << 4 | to
    } else {
        to << 4 | from
    };
    Instruction {
        code,
        registers,
        offset,
        immediate,
    }
}

impl Instruction {
    /// Sets the target of a jump at the index `from`.
    fn jump_to(&mut self, from: usize, target: usize) {
        let distance = target.saturating_sub(from + 1);
        self.offset = i16::try_from(distance).unwrap_or(i16::MAX);
    }
}

pub(crate) fn copy(to: Register, from: Register) -> Instruction {
    instruction(0xbf, to, from, 0, 0)
}

pub(crate) fn set(to: Register, value: i32) -> Instruction {
    instruction(0xb7, to, R0, 0, value)
}

pub(crate) fn add(to: Register, value: i32) -> Instruction {
    instruction(0x07, to, R0, 0, value)
}

pub(crate) fn shift_right(of: Register, bits: i32) -> Instruction {
    instruction(0x77, of, R0, 0, bits)
}

/// Converts a value from network byte order to this machine's.
pub(crate) fn from_network_order32(of: Register) -> Instruction {
    instruction(0xdc, of, R0, 0, 32)
}

pub(crate) fn from_network_order16(of: Register) -> Instruction {
    instruction(0xdc, of, R0, 0, 16)
}

pub(crate) fn shift_left(of: Register, bits: i32) -> Instruction {
    instruction(0x67, of, R0, 0, bits)
}

pub(crate) fn and(of: Register, mask: i32) -> Instruction {
    instruction(0x57, of, R0, 0, mask)
}

pub(crate) fn subtract(from: Register, value: Register) -> Instruction {
    instruction(0x1f, from, value, 0, 0)
}

pub(crate) fn add_register(to: Register, value: Register) -> Instruction {
    instruction(0x0f, to, value, 0, 0)
}

/// Adds the lower halves modulo 2^32; the upper half becomes zero.
pub(crate) fn add_register32(to: Register, value: Register) -> Instruction {
    instruction(0x0c, to, value, 0, 0)
}

/// Subtracts the lower halves modulo 2^32; the upper half becomes zero.
pub(crate) fn subtract32(from: Register, value: Register) -> Instruction {
    instruction(0x1c, from, value, 0, 0)
}

pub(crate) fn load8(to: Register, base: Register, offset: i16) -> Instruction {
    instruction(0x71, to, base, offset, 0)
}

pub(crate) fn load16(to: Register, base: Register, offset: i16) -> Instruction {
    instruction(0x69, to, base, offset, 0)
}

pub(crate) fn load32(to: Register, base: Register, offset: i16) -> Instruction {
    instruction(0x61, to, base, offset, 0)
}

pub(crate) fn load64(to: Register, base: Register, offset: i16) -> Instruction {
    instruction(0x79, to, base, offset, 0)
}

pub(crate) fn store16(base: Register, offset: i16, value: i32) -> Instruction {
    instruction(0x6a, base, R0, offset, value)
}

pub(crate) fn store32(base: Register, offset: i16, value: i32) -> Instruction {
    instruction(0x62, base, R0, offset, value)
}

pub(crate) fn store_register16(base: Register, offset: i16, value: Register) -> Instruction {
    instruction(0x6b, base, value, offset, 0)
}

pub(crate) fn store_register32(base: Register, offset: i16, value: Register) -> Instruction {
    instruction(0x63, base, value, offset, 0)
}

pub(crate) fn store64(base: Register, offset: i16, value: Register) -> Instruction {
    instruction(0x7b, base, value, offset, 0)
}

/// Loads the address of a map. The kernel replaces the descriptor in the first instruction.
pub(crate) fn set_map(to: Register, map: RawFd) -> [Instruction; 2] {
    const MAP_BY_FD: Register = Register::R1;
    [
        instruction(0x18, to, MAP_BY_FD, 0, map),
        instruction(0, R0, R0, 0, 0),
    ]
}

/// Loads the address of the first value of a map of few numbers (Linux 5.2 or later).
///
/// The kernel replaces the descriptor in the first instruction.
pub(crate) fn set_map_value(to: Register, map: RawFd) -> [Instruction; 2] {
    const VALUE_BY_FD: Register = Register::R2;
    [
        instruction(0x18, to, VALUE_BY_FD, 0, map),
        instruction(0, R0, R0, 0, 0),
    ]
}

pub(crate) fn jump_if_not(register: Register, value: i32) -> Instruction {
    instruction(0x55, register, R0, 0, value)
}

pub(crate) fn jump() -> Instruction {
    instruction(0x05, R0, R0, 0, 0)
}

pub(crate) fn jump_if(register: Register, value: i32) -> Instruction {
    instruction(0x15, register, R0, 0, value)
}

pub(crate) fn jump_if_at_least(register: Register, value: i32) -> Instruction {
    instruction(0x35, register, R0, 0, value)
}

/// Jumps if any of these bits is set.
pub(crate) fn jump_if_any(register: Register, bits: i32) -> Instruction {
    instruction(0x45, register, R0, 0, bits)
}

/// Compares the lower halves, so that a value with the highest bit set is no negative number.
pub(crate) fn jump32_if_not(register: Register, value: i32) -> Instruction {
    instruction(0x56, register, R0, 0, value)
}

pub(crate) fn jump_if_zero(register: Register) -> Instruction {
    jump_if(register, 0)
}

pub(crate) fn jump_if_less(register: Register, value: i32) -> Instruction {
    instruction(0xa5, register, R0, 0, value)
}

pub(crate) fn jump_if_greater(register: Register, value: i32) -> Instruction {
    instruction(0x25, register, R0, 0, value)
}

/// Jumps if `register` is greater than `than`.
pub(crate) fn jump_if_greater_than(register: Register, than: Register) -> Instruction {
    instruction(0x2d, register, than, 0, 0)
}

pub(crate) fn call(helper: Helper) -> Instruction {
    instruction(0x85, R0, R0, 0, helper as i32)
}

pub(crate) fn exit() -> Instruction {
    instruction(0x95, R0, R0, 0, 0)
}

/// A program being written. [`Code::finish`] replaces the labels of jumps by distances.
#[derive(Debug)]
pub(crate) struct Code<Label> {
    instructions: Vec<Instruction>,
    labels: Vec<(Label, usize)>,
    jumps: Vec<(usize, Label)>,
}

impl<Label: Copy + PartialEq> Code<Label> {
    pub(crate) fn new() -> Self {
        Self {
            instructions: Vec::new(),
            labels: Vec::new(),
            jumps: Vec::new(),
        }
    }

    pub(crate) fn push(&mut self, instruction: Instruction) {
        self.instructions.push(instruction);
    }

    pub(crate) fn extend(&mut self, instructions: impl IntoIterator<Item = Instruction>) {
        self.instructions.extend(instructions);
    }

    /// Adds a jump to the instruction after the label.
    pub(crate) fn jump(&mut self, instruction: Instruction, to: Label) {
        self.jumps.push((self.instructions.len(), to));
        self.instructions.push(instruction);
    }

    pub(crate) fn label(&mut self, label: Label) {
        self.labels.push((label, self.instructions.len()));
    }

    pub(crate) fn finish(mut self) -> Vec<Instruction> {
        for (at, to) in self.jumps {
            let target = self.labels.iter().find(|(label, _)| *label == to);
            // A missing label makes a jump past the end, which the verifier refuses.
            let target = target.map_or(usize::MAX, |(_, target)| *target);
            self.instructions[at].jump_to(at, target);
        }
        self.instructions
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_jump_goes_to_the_instruction_after_its_label() {
        let mut code = Code::new();
        code.jump(jump(), "end");
        code.push(set(R0, 1));
        code.label("end");
        code.push(exit());
        let [jump, ..] = code.finish()[..] else {
            panic!("no program");
        };
        assert_eq!(jump.offset, 1);
    }
}
