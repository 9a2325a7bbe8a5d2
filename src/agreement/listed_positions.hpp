// Checks that the ranks list every position of a sequence once. A listed table is one rank's own,
// so that no rank alone sees that a position is another's too, or nobody's; without the check both
// give a result, which is wrong.
//
//     on each rank    count and sum of h(position) over its table; h is a step of splitmix64
//     over all ranks  both must be those of 0 ... length - 1
//
// Sums know no order, and h gives different words for different positions: one key in the place of
// another is found always, any other difference with probability 1 - 2^-64. Then the ranks narrow
// it down together, since all of them see it, and the error names the position and who lists it.
//
// Tables are read here, so on GPUs they are checked with Debug::check_arrays alone, which waits for
// the stream and copies them, and never while a graph is captured.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "comm/transport.hpp"
#include "src/strategy/strategy.hpp"

namespace longspan {

class ListedPositions {
 public:
  /// The options say whether there is anything to check in the runs of a layer.
  ListedPositions(comm::Transport& comm, const Options& options);

  /// False where no run has a listed table of keys or queries that is read.
  bool are_checked() const { return !said_.empty(); }

  /// [ranks] how many keys each rank lists in the run that was checked last; null where no keys are
  /// listed, and on GPUs.
  const std::int64_t* counts() const {
    return keys_ && comm_.device() == Device::host ? keys_of_rank_.data() : nullptr;
  }

  /// Checks the tables of a run. It is collective. On processors it also compares what ranks say of
  /// the run. Throws InputError, on every rank, for what two entries list or none.
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
  /// What a rank says of its tables.
  struct Said {
    Sums keys, rows;
    std::int64_t length = 0;  // of the sequence
  };
  /// The sums of 0 ... length - 1, from those of the run before: a step of decode adds one
  /// position.
  class Whole {
   public:
    const Sums& of(std::int64_t length);

   private:
    Sums sums_;
  };

  /// One rank's tables, in memory of the host.
  struct Tables {
    std::span<const std::int64_t> keys, rows;
    std::int64_t length = 0;  // of the sequence
  };
  /// Whether all ranks say one length, which the layer takes. An array on a GPU may hold any.
  bool agree_on_length(std::int64_t most) const;
  /// Those of a run. False where they cannot be read now.
  bool read(const Run& run, Tables& tables);
  /// recv [ranks, count] = what every rank has. `said`: as of Transport::all_gather.
  template <class T>
  void gather(const T* send, std::size_t count, T* recv, Stream stream, const char* step,
              std::uint64_t* said = nullptr) const;

  static Sums sums_of(std::span<const std::int64_t> table);
  /// Throws, on every rank, with the first position that is not listed once.
  [[noreturn]] void find(const char* name, std::span<const std::int64_t> table, std::int64_t length,
                         std::int64_t listed, Stream stream) const;

  comm::Transport& comm_;
  bool keys_;                               // are listed
  bool rows_;                               // of sharded queries are
  std::vector<Said> said_;                  // [ranks]
  std::vector<std::int64_t> keys_of_rank_;  // [ranks]
  Whole whole_keys_, whole_rows_;
  std::vector<std::int64_t> key_table_, row_table_;  // copies of those on a GPU
};

}  // namespace longspan
