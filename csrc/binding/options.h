/* The options of a call as the operators take them: a list of integers, a list of floating-point
 * numbers and a text. A list costs the dispatcher less time than its items as single arguments
 * (benchmarks/NOTES.md, 2026-11-22). */
#ifndef FLCE_BINDING_OPTIONS_H
#define FLCE_BINDING_OPTIONS_H

#include <optional>
#include <string>
#include <vector>

#include "binding/errors.h"

namespace flce {

/* The slots of the integers, in order. Those of the numbers are FLCE_LOSS_NUMBERS, gradient_eps and
 * FLCE_DIVERGENCE_NUMBERS.
 * flce/packing.py packs both lists by these names. A dtype is its index in flce_dtype, or -1 where
 * the call has none of its own. `autocast`: the dtype to which it casts. `traced`: in a compiled
 * graph. start and vocab, of VocabParallel, are -1 where they are None; ranks is 0 where the
 * vocabulary is not sharded. divergence: one of flce_divergence. */
#define FLCE_INTEGERS(SLOT)                                                                     \
  SLOT(reduction), SLOT(ignore_index), SLOT(accum_dtype), SLOT(logits_dtype), SLOT(save),       \
      SLOT(max_memory), SLOT(kept_memory), SLOT(gradient), SLOT(autocast), SLOT(frozen_hidden), \
      SLOT(wants_lse), SLOT(wants_entropy), SLOT(entropy_gradient), SLOT(wants_predictions),    \
      SLOT(topk), SLOT(wants_tail), SLOT(class_gradient), SLOT(wants_statistics),               \
      SLOT(bound_is_default), SLOT(accumulates), SLOT(traced), SLOT(grad_input),                \
      SLOT(grad_weight), SLOT(grad_bias), SLOT(consumes_saved), SLOT(allow_tf32), SLOT(ranks),  \
      SLOT(rank), SLOT(start), SLOT(vocab), SLOT(input_is_sharded), SLOT(partial_grad_input),   \
      SLOT(wide_terms), SLOT(first_token), SLOT(divergence), SLOT(layout)

/* The numbers of a divergence: its own, and those that map the teacher's logits to the final ones.
 */
#define FLCE_DIVERGENCE_NUMBERS(SLOT) \
  SLOT(beta)                          \
  SLOT(hard_weight) SLOT(teacher_softcap) SLOT(teacher_logit_scale) SLOT(teacher_temperature)

/* Version of the lists and of the shapes of the tensors that a forward saves for its backward.
 * Raise it when they change for the same options: torch keeps compiled graphs on disk, and a graph
 * compiled with an earlier build must not run with this one. */
constexpr int64_t kLayout = 11;

#define FLCE_SLOT(name) name
enum class IntegerSlot : size_t { FLCE_INTEGERS(FLCE_SLOT), count };
#undef FLCE_SLOT
#define FLCE_SLOT(name, ...) name,
enum class NumberSlot : size_t {
  FLCE_LOSS_NUMBERS(FLCE_SLOT) gradient_eps,
  FLCE_DIVERGENCE_NUMBERS(FLCE_SLOT) count
};
#undef FLCE_SLOT

/* The names of the slots, separated by blanks, the integers first and then " /". */
std::string option_names();

/* Numbers that map a teacher's logits to the final ones, as those of flce_loss. */
struct TeacherNumbers {
  double softcap, logit_scale, temperature;
};

/* The options of a call; the fields of `problem` that follow from them are set. */
struct PackedOptions {
  flce_problem problem;
  TeacherNumbers teacher;
  bool allow_tf32;
  int accum_dtype, logits_dtype, autocast; /* flce_dtype or -1 */
  int64_t start, vocab;                    /* of VocabParallel, or -1 */
};

/* Reads the lists; checks their lengths and the range of each slot that is an index or a flag. */
PackedOptions unpack_options(const std::vector<int64_t>& integers,
                             const std::vector<double>& numbers);

}  // namespace flce

#endif
