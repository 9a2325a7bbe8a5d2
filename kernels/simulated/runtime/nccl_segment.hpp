// The state that the ranks of one communicator share: which ranks have joined, and a ring buffer
// from each rank to each other one, in named memory. Ranks are processes of one host, or threads.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace longspan::simulated {

/// A name that has never been used.
std::string fresh_segment_name();

class Segment {
 public:
  enum class State : std::uint32_t { absent, here, left, aborted };

  /// Adds rank `rank` of `size`, with a GPU by its index on the node. Null: its memory cannot be
  /// allocated, or this rank has already joined.
  static std::shared_ptr<Segment> open(const std::string& name, int rank, int size, int gpu);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  int size() const { return size_; }
  const std::string& name() const { return name_; }

  bool are_all_here() const;
  bool have_all_left() const;
  bool has_other_processes() const;
  bool shares_a_gpu() const;
  /// Whether the process of a rank ended before the rank had left. It checks only from time to
  /// time.
  bool has_lost_a_rank();

  void leave(State how);

  /// This rank's report at a split, and that of another.
  struct Announcement {
    int color, key;
  };
  void announce(std::uint32_t split, Announcement announced);
  bool has_announced(int rank, std::uint32_t split, Announcement& announced) const;

  /// Sends to a rank as many bytes as there is room for; receives from one as many as have arrived.
  std::size_t send(int to, const std::byte* data, std::size_t bytes);
  std::size_t receive(int from, std::byte* data, std::size_t bytes);

 private:
  struct Member;
  struct Ring;
  struct Layout;
  Segment(std::string name, int rank, int size, void* memory);
  Member& member(int rank) const;
  Ring& ring(int from, int to) const;

  std::string name_;
  int rank_, size_;
  void* memory_;
  std::int64_t looked_ns_ = 0;
};

}  // namespace longspan::simulated
