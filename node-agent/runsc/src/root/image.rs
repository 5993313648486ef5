//! An EROFS image with one program and empty directories. It has two blocks; the second block is
//! the program.
//!
//! Source: Linux, `Documentation/filesystems/erofs.rst` and `fs/erofs/erofs_fs.h`. gVisor reads a
//! program's data only as a plain run of blocks (`pkg/erofs`, `Inode.DataOffset`).

use torpor_snapshots::Digest;

use super::fields::fields;

const BLOCK_BITS: u8 = 12;
const BLOCK: usize = 1 << BLOCK_BITS;
const SUPER_BLOCK: usize = 1024;
const SUPER_BLOCK_BYTES: usize = 128;
/// Bytes of a slot. An inode's number is the number of its slot in the image.
const SLOT: usize = 32;
/// Bytes of a directory entry without its name.
const DIRENT: usize = 12;

/// Data layouts of an inode: a run of blocks, and behind the inode.
const PLAIN: u64 = 0;
const INLINE: u64 = 2;
/// Mode of an inode, and file type of its directory entry.
const DIRECTORY: (u64, u8) = (0o040_555, 2);
const PROGRAM: (u64, u8) = (0o100_555, 1);

/// Returns an image of `program`, named `name`, and `directories`. Names of directories have no
/// slash, are sorted bytewise and differ from the program's. The program must fit in a block, and
/// so must the inodes.
pub(super) fn image(name: &str, program: &[u8], directories: &[&str]) -> Vec<u8> {
    let first = nid(SUPER_BLOCK + SUPER_BLOCK_BYTES);
    let mut names: Vec<&str> = directories.iter().copied().chain([name]).collect();
    names.sort_unstable();
    // The root directory comes first, its entries follow.
    let root_slots = (SLOT + entries_size(&names)).div_ceil(SLOT);
    let mut next = first + root_slots;
    let mut entries = vec![(".", first, DIRECTORY.1), ("..", first, DIRECTORY.1)];
    let mut inodes = Vec::new();
    for entry in names {
        if entry == name {
            entries.push((entry, next, PROGRAM.1));
            inodes.push((next, inode(PROGRAM.0, 1, PLAIN, program.len(), 1, next)));
        } else {
            entries.push((entry, next, DIRECTORY.1));
            let own = [(".", next, DIRECTORY.1), ("..", first, DIRECTORY.1)];
            inodes.push((next, directory(2, &own, next)));
        }
        next += inodes
            .last()
            .map_or(0, |(_, bytes)| bytes.len().div_ceil(SLOT));
    }
    inodes.push((first, directory(2 + directories.len(), &entries, first)));

    let mut image = vec![0; 2 * BLOCK];
    for (nid, bytes) in &inodes {
        image[nid * SLOT..][..bytes.len()].copy_from_slice(bytes);
    }
    image[BLOCK..][..program.len()].copy_from_slice(program);
    // gVisor compares super blocks when it restores. The digest of the content makes them differ
    // between images.
    let of_content = Digest::of(&image);
    let super_block = super_block(first, inodes.len(), of_content);
    image[SUPER_BLOCK..][..super_block.len()].copy_from_slice(&super_block);
    image
}

fn nid(offset: usize) -> usize {
    offset / SLOT
}

/// Returns the bytes of a directory's entries for these names, `.` and `..`.
fn entries_size(names: &[&str]) -> usize {
    let all = [".", ".."].iter().chain(names);
    all.map(|name| DIRENT + name.len()).sum()
}

/// Returns a compact inode.
fn inode(mode: u64, links: usize, layout: u64, size: usize, block: u64, nid: usize) -> Vec<u8> {
    fields(&[
        (layout << 1, 2),  // compact
        (0, 2),            // no extended attributes
        (mode, 2),         //
        (links as u64, 2), //
        (size as u64, 4),  //
        (0, 4),            // reserved
        (block, 4),        //
        (nid as u64, 4),   // its number for stat
        (0, 2 + 2 + 4),    // uid, gid, reserved
    ])
}

/// Returns a directory's inode with its entries behind it.
fn directory(links: usize, entries: &[(&str, usize, u8)], own: usize) -> Vec<u8> {
    let size = entries.iter().map(|(name, ..)| DIRENT + name.len()).sum();
    let mut bytes = inode(DIRECTORY.0, links, INLINE, size, 0, own);
    let mut name_offset = entries.len() * DIRENT;
    for (name, nid, kind) in entries {
        bytes.extend(fields(&[
            (*nid as u64, 8),
            (name_offset as u64, 2),
            (u64::from(*kind), 1),
            (0, 1),
        ]));
        name_offset += name.len();
    }
    for (name, ..) in entries {
        bytes.extend(name.as_bytes());
    }
    bytes
}

fn super_block(root: usize, inodes: usize, of_content: Digest) -> Vec<u8> {
    let mut bytes = fields(&[
        (0xe0f5_e1e2, 4),           // magic
        (0, 4 + 4),                 // no checksum: no compatible features
        (u64::from(BLOCK_BITS), 1), //
        (0, 1),                     // no longer than usual
        (root as u64, 2),           //
        (inodes as u64, 8),         //
        (0, 8 + 4),                 // made in 1970
        (2, 4),                     // blocks
        (0, 4 + 4),                 // inodes begin in the first block, no shared attributes
    ]);
    bytes.extend(&of_content.as_bytes()[..16]);
    bytes.resize(SUPER_BLOCK_BYTES, 0);
    bytes
}
