// One operation of a communicator: the bytes to and from each rank, in the order of the calls. It
// makes progress whenever it is polled, and ends when all bytes are sent and received.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "kernels/simulated/runtime/nccl_segment.hpp"
#include "kernels/simulated/runtime/operations.hpp"

namespace longspan::simulated {

struct Piece {
  int peer;
  const std::byte* from = nullptr;  // null: receive
  std::byte* to = nullptr;          // null: send
  std::size_t bytes = 0;
};

class Transfer {
 public:
  Transfer(std::shared_ptr<Segment> segment, int rank, const std::vector<Piece>& pieces);
  Progress go_on();

 private:
  /// The length of each piece travels before it. If the two sides ask for different lengths, the
  /// one that wants less gets that much, and the other one waits.
  struct Part {
    Piece piece;
    std::uint64_t announced = 0;
    std::size_t done = 0;  // bytes, including those of the length
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
