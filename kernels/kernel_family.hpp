// A family of attention kernels declares which calls it accepts, what they need and how they end.
// Each device has its families in one ordered table: the first one that accepts a call serves it,
// and nothing else chooses. `longspan info --kernels` prints the tables, and the docs show its
// output.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kernels/params.hpp"
#include "longspan/types.hpp"

namespace longspan::kernels {

/// How a family's rows end.
enum class Ends : std::uint8_t {
  in_states,  // always possible
  by_fold,    // if the keys are split, the fold of the splits makes the result
  itself,     // the kernel makes the result
};

/// Texts about a family for people.
struct FamilyWords {
  const char* name;
  const char* queries;
  const char* heads;
  const char* takes;
};

/// The families of a device, which defines three types: `Asked`, what families are asked about
/// besides the call; `Room`, the scratch that they need; `Attend`, the call of a kernel. What a
/// family never does is null.
template <class On>
struct KernelFamily {
  using Asked = typename On::Asked;

  typename On::Id id;
  FamilyWords words;
  Ends ends;  // how its rows can end; `finishes` returns how those of a call do
  /// Whether the family accepts these rows; a family before it in the table has precedence.
  bool (*accepts)(const AttendParams&, const Asked&);
  /// Throws Unsupported for features of only this family, if the device has no such kernel.
  void (*check)(const AttendParams&, const Asked&) = nullptr;
  /// The scratch of a call; and the most of any call within these limits.
  std::size_t (*needs)(const AttendParams&, const Asked&) = nullptr;
  typename On::Room (*scratch)(const AttendParams&, const Asked&) = nullptr;
  typename On::Attend attend;
  /// How rows of this call end, if their result is wanted.
  Ends (*finishes)(const AttendParams&, const MergeParams&) = nullptr;
  /// Whether the call may be queued before all keys of other ranks have arrived (KeyArrivals).
  bool (*takes_arrivals)(const AttendParams&) = nullptr;
  /// Whether the call itself writes its new keys and values into the cache.
  bool (*writes_new_keys)(const AttendParams&) = nullptr;
};

/// Returns the first family that accepts, or null.
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

/// All families of both devices, in the order in which they are tried.
std::vector<FamilyRow> family_rows();

}  // namespace longspan::kernels
