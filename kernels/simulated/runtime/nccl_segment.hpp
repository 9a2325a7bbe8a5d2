// What the ranks of one communicator share: who is there, and a ring of bytes from each rank to
// each other one, in memory that has a name. Ranks are processes of one host, or threads.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace longspan::simulated {

/// A name that nobody has had.
std::string fresh_segment_name();

class Segment {
 public:
  enum class State : std::uint32_t { absent, here, left, aborted };

  /// Rank `rank` of `size` comes, with a GPU by its place on the node. Null: its memory cannot be
  /// had, or this rank is there already.
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
  /// The process of a rank ended, and the rank had not left before. Looks now and then only.
  bool has_lost_a_rank();

  void leave(State how);

  /// What this rank says at a split, and what another has said there.
  struct Said {
    int color, key;
  };
  void say(std::uint32_t split, Said said);
  bool has_said(int rank, std::uint32_t split, Said& said) const;

  /// As many bytes as there is room for, to a rank; as have come, from one.
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
