// One operation of a communicator: what goes to each rank and what comes from it, in the order of
// the calls. It goes on whenever it is asked to, and ends when all of it has gone and come.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "kernels/simulated/runtime/nccl_segment.hpp"
#include "kernels/simulated/runtime/operations.hpp"

namespace longspan::simulated {

struct Piece {
  int peer;
  const std::byte* from = nullptr;  // null: it comes
  std::byte* to = nullptr;          // null: it goes
  std::size_t bytes = 0;
};

class Transfer {
 public:
  Transfer(std::shared_ptr<Segment> segment, int rank, const std::vector<Piece>& pieces);
  Progress go_on();

 private:
  /// Ahead of each piece its length travels. Where the two sides do not mean the same, the one that
  /// wants less gets that much, and the other one waits.
  struct Part {
    Piece piece;
    std::uint64_t announced = 0;
    std::size_t done = 0;  // bytes, the length's included
    bool is_stuck = false;
  };
  using Parts = std::deque<Part>;
  bool send(int to, Part& part);
  bool receive(int from, Part& part);
  bool has_ended(int peer, Part& part);

  std::shared_ptr<Segment> segment_;
  int rank_;
  std::vector<Parts> going_, coming_;  // by rank
};

}  // namespace longspan::simulated
