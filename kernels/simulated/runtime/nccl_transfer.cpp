#include "kernels/simulated/runtime/nccl_transfer.hpp"

#include <cstdio>
#include <cstring>
#include <utility>

namespace longspan::simulated {
namespace {

constexpr std::size_t kLength = sizeof(std::uint64_t);

}  // namespace

Transfer::Transfer(std::shared_ptr<Segment> segment, int rank, const std::vector<Piece>& pieces)
    : segment_(std::move(segment)),
      rank_(rank),
      going_(static_cast<std::size_t>(segment_->size())),
      coming_(going_.size()) {
  for (const Piece& piece : pieces) {
    auto& parts = piece.from != nullptr ? going_ : coming_;
    parts[static_cast<std::size_t>(piece.peer)].push_back({piece, piece.bytes, 0});
  }
}

/// True: something went.
bool Transfer::send(int to, Part& part) {
  const std::size_t before = part.done;
  if (part.done < kLength)
    part.done += segment_->send(to, reinterpret_cast<const std::byte*>(&part.announced) + part.done,
                                kLength - part.done);
  if (part.done >= kLength)
    part.done += segment_->send(to, part.piece.from + (part.done - kLength),
                                part.piece.bytes + kLength - part.done);
  return part.done > before;
}

bool Transfer::receive(int from, Part& part) {
  const std::size_t before = part.done;
  if (part.done < kLength)
    part.done += segment_->receive(from, reinterpret_cast<std::byte*>(&part.announced) + part.done,
                                   kLength - part.done);
  if (part.done < kLength) return part.done > before;
  if (part.announced != part.piece.bytes) {  // with NCCL this hangs, or worse
    std::fprintf(stderr,
                 "simulated NCCL: rank %d waits for %zu bytes of rank %d, which sends %zu\n", rank_,
                 part.piece.bytes, from, static_cast<std::size_t>(part.announced));
    is_stuck_ = true;
    return false;
  }
  part.done += segment_->receive(from, part.piece.to + (part.done - kLength),
                                 part.piece.bytes + kLength - part.done);
  return part.done > before;
}

Progress Transfer::go_on() {
  if (is_stuck_) return Progress::none;
  bool any = false, all = true;
  for (int peer = 0; peer < segment_->size(); ++peer) {
    Parts& going = going_[static_cast<std::size_t>(peer)];
    Parts& coming = coming_[static_cast<std::size_t>(peer)];
    if (peer == rank_) {
      for (; !going.empty() && !coming.empty(); going.pop_front(), coming.pop_front()) {
        std::memmove(coming.front().piece.to, going.front().piece.from, going.front().piece.bytes);
        any = true;
      }
    }
    const auto move = [&](Parts& parts, auto step) {
      while (!parts.empty() && peer != rank_) {
        any = (this->*step)(peer, parts.front()) || any;
        if (parts.front().done < parts.front().piece.bytes + kLength || is_stuck_) break;
        parts.pop_front();
      }
      all = all && parts.empty();
    };
    move(going, &Transfer::send);
    move(coming, &Transfer::receive);
  }
  if (is_stuck_) return Progress::none;
  return all ? Progress::ended : any ? Progress::some : Progress::none;
}

}  // namespace longspan::simulated
