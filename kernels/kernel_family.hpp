// A family of attention kernels says for itself which calls are its own, what they need and how
// they end. Each device has its families in one ordered table: the first one that accepts a call
// serves it, and nothing else chooses. `longspan info --kernels` prints the tables, and the docs
// show what it prints.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kernels/params.hpp"
#include "longspan/types.hpp"

namespace longspan::kernels {

/// Where a family's rows end.
enum class Ends : std::uint8_t {
  in_states,  // always there
  by_fold,    // the fold of the splits makes the result, where the keys are split
  itself,     // the kernel makes the result
};

/// What people read of a family.
struct FamilyWords {
  const char* name;
  const char* queries;
  const char* heads;
  const char* takes;
};

/// The families of a device, which says what its own are asked: `Asked` is what they are asked
/// about beside the call, `Room` the scratch that they need, `Attend` the call of a kernel. What a
/// family never does is null.
template <class On>
struct KernelFamily {
  using Asked = typename On::Asked;

  typename On::Id id;
  FamilyWords words;
  Ends ends;  // where rows can end: `finishes` says where those of a call do
  /// Whether these rows are the family's, unless one ahead of it in the table takes them.
  bool (*accepts)(const AttendParams&, const Asked&);
  /// Throws Unsupported for what only this family does, where the device has no such kernel.
  void (*check)(const AttendParams&, const Asked&) = nullptr;
  /// The scratch that a call takes; and the most that any call within these limits does.
  std::size_t (*needs)(const AttendParams&, const Asked&) = nullptr;
  typename On::Room (*scratch)(const AttendParams&, const Asked&) = nullptr;
  typename On::Attend attend;
  /// How rows of this call end, if their result is wanted.
  Ends (*finishes)(const AttendParams&, const MergeParams&) = nullptr;
  /// Whether the call may be queued while keys of other ranks still come (KeyArrivals).
  bool (*takes_arrivals)(const AttendParams&) = nullptr;
  /// Whether the call writes its new keys and values into the cache itself.
  bool (*writes_new_keys)(const AttendParams&) = nullptr;
};

/// Gives the first family that accepts, or null.
template <class On>
const KernelFamily<On>* first_that_accepts(std::span<const KernelFamily<On>> families,
                                           const AttendParams& p, const typename On::Asked& asked) {
  for (const KernelFamily<On>& family : families)
    if (family.accepts(p, asked)) return &family;
  return nullptr;
}

/// A line of `longspan info --kernels`.
struct FamilyRow {
  Device device;
  FamilyWords words;
  Ends ends;
  bool takes_arrivals;
  bool writes_new_keys;
};

/// All families of both devices, in the order in which they are asked.
std::vector<FamilyRow> family_rows();

}  // namespace longspan::kernels
