// Checks that the ranks together list every position of a sequence once. A listed table is one
// rank's own, so no rank alone can see that another rank also lists a position, or that none does.
// Without the check the result would be wrong without an error.
//
//     on each rank    count and sum of h(position) over its table; h is a step of splitmix64
//     over all ranks  both must be those of 0 ... length - 1
//
// Each rank sums a word h for each position. Sums do not depend on the order, and h gives different
// words for different positions: one key in the place of another is always found, any other
// difference with probability 1 - 2^-64. Since all ranks see the difference, they then search for
// it together, and the error names the position and the ranks that list it.
//
// The host reads the tables. On GPUs they are therefore checked only with Debug::check_arrays,
// which waits for the stream and copies them, and never while a graph is captured.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "comm/transport.hpp"
#include "src/strategy/strategy.hpp"

namespace longspan {

class ListedPositions {
 public:
  /// The options decide whether the runs of a layer need any check.
  ListedPositions(comm::Transport& comm, const Options& options);

  /// False if no run has a listed table of keys or queries that is read.
  bool are_checked() const { return !reports_.empty(); }

  /// [ranks] number of keys that each rank lists in the last checked run; null if no keys are
  /// listed, and on GPUs.
  const std::int64_t* counts() const {
    return keys_ && comm_.device() == Device::host ? keys_of_rank_.data() : nullptr;
  }

  /// Checks the tables of a run. Collective. On CPUs it also compares what ranks report of the run.
  /// Throws InputError, on every rank, for a position that is listed twice or not at all.
  void check(Pass& pass);

 private:
  struct Sums {
    std::int64_t count = 0;
    std::uint64_t sum = 0;

    bool operator==(const Sums&) const = default;
    void add(std::int64_t position);
    void add(const Sums& other) {
      count += other.count;
      sum += other.sum;
    }
  };
  /// What a rank reports of its tables.
  struct Report {
    Sums keys, rows;
    std::int64_t length = 0;  // of the sequence
  };
  /// The sums over 0 ... length - 1, updated from those of the run before: a decode step adds one
  /// position.
  class Whole {
   public:
    const Sums& of(std::int64_t length);

   private:
    Sums sums_;
  };

  /// One rank's tables, in host memory.
  struct Tables {
    std::span<const std::int64_t> keys, rows;
    std::int64_t length = 0;  // of the sequence
  };
  /// Whether all ranks report the same length, and the layer accepts it. An array on a GPU may hold
  /// any.
  bool agree_on_length(std::int64_t most) const;
  /// Reads the tables of a run. False if they cannot be read now.
  bool read(const Run& run, Tables& tables);
  /// recv [ranks, count] = every rank's `send`. `digests`: as in Transport::all_gather.
  template <class T>
  void gather(const T* send, std::size_t count, T* recv, Stream stream, const char* step,
              std::uint64_t* digests = nullptr) const;

  static Sums sums_of(std::span<const std::int64_t> table);
  /// Throws, on every rank, with the first position that is not listed exactly once.
  [[noreturn]] void find(const char* name, std::span<const std::int64_t> table, std::int64_t length,
                         std::int64_t listed, Stream stream) const;

  comm::Transport& comm_;
  bool keys_;                               // are listed
  bool rows_;                               // of sharded queries are listed
  std::vector<Report> reports_;             // [ranks]; empty if nothing is checked
  std::vector<std::int64_t> keys_of_rank_;  // [ranks]
  Whole whole_keys_, whole_rows_;
  std::vector<std::int64_t> key_table_, row_table_;  // host copies of tables on a GPU
};

}  // namespace longspan
