//! Constants whose documentation is data too, for the pages under docs/reference.

/// A constant with its documentation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Documented {
    /// Value of the constant.
    pub value: &'static str,
    /// Its doc comment as one paragraph.
    pub text: &'static str,
}

/// Declares string constants, each with a doc comment, and lists them.
///
/// With `pub mod NAME` the constants are of a module, and the lists are its `ALL` (the values) and
/// `DOCUMENTED`. With `pub const LIST` they are of the module around, and `LIST` has them with
/// their documentation.
macro_rules! documented {
    (
        $(#[doc = $about:literal])+
        pub mod $module:ident {
            $($(#[doc = $line:literal])+ $name:ident = $value:expr;)+
        }
    ) => {
        $(#[doc = $about])+
        pub mod $module {
            $($(#[doc = $line])+ pub const $name: &str = $value;)+

            /// Every value of this module.
            pub const ALL: &[&str] = &[$($name),+];

            /// Every value of this module with its documentation.
            pub const DOCUMENTED: &[$crate::documented::Documented] = &[$(
                $crate::documented::Documented { value: $name, text: concat!($($line),+).trim_ascii() }
            ),+];
        }
    };
    (
        $(#[doc = $about:literal])+
        pub const $list:ident;
        $($(#[doc = $line:literal])+ $name:ident = $value:expr;)+
    ) => {
        $($(#[doc = $line])+ pub const $name: &str = $value;)+

        $(#[doc = $about])+
        pub const $list: &[$crate::documented::Documented] = &[$(
            $crate::documented::Documented { value: $name, text: concat!($($line),+).trim_ascii() }
        ),+];
    };
}

pub(crate) use documented;
