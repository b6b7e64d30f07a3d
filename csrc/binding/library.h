/* The registrations of operators, in the namespace FLCE_OPS that the build names: a process may
 * load several builds of flce. */
#ifndef FLCE_BINDING_LIBRARY_H
#define FLCE_BINDING_LIBRARY_H

#include <torch/csrc/stable/library.h>

/* Twice, as torch's macros do not expand the name that they are given. */
#define FLCE_LIBRARY(m) FLCE_LIBRARY_OF(FLCE_OPS, m)
#define FLCE_LIBRARY_OF(ops, m) STABLE_TORCH_LIBRARY(ops, m)
#define FLCE_LIBRARY_FRAGMENT(m) FLCE_LIBRARY_FRAGMENT_OF(FLCE_OPS, m)
#define FLCE_LIBRARY_FRAGMENT_OF(ops, m) STABLE_TORCH_LIBRARY_FRAGMENT(ops, m)
#define FLCE_LIBRARY_IMPL(key, m) FLCE_LIBRARY_IMPL_OF(FLCE_OPS, key, m)
#define FLCE_LIBRARY_IMPL_OF(ops, key, m) STABLE_TORCH_LIBRARY_IMPL(ops, key, m)

#endif
