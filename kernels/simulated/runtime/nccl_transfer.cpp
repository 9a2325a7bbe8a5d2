#include "kernels/simulated/runtime/nccl_transfer.hpp"

#include <algorithm>
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
    parts[static_cast<std::size_t>(piece.peer)].push_back({piece, piece.bytes});
  }
}

/// True: some bytes were sent.
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
  const std::size_t taken = part.done - kLength, wanted = part.piece.bytes;
  if (taken < wanted && taken < part.announced)
    part.done += segment_->receive(from, part.piece.to + taken,
                                   std::min<std::size_t>(wanted, part.announced) - taken);
  while (part.done - kLength >= wanted && part.done - kLength < part.announced) {
    std::byte excess[256];  // more than this rank asked for; they are dropped
    const std::size_t left = part.announced - (part.done - kLength);
    const std::size_t count = segment_->receive(from, excess, std::min(left, sizeof excess));
    if (count == 0) break;
    part.done += count;
  }
  return part.done > before;
}

/// A part with fewer bytes than awaited never ends, as with NCCL.
bool Transfer::has_ended(int from, Part& part) {
  if (part.done < kLength || part.done - kLength < part.announced) return false;
  if (part.announced >= part.piece.bytes) return true;
  if (!part.is_stuck)
    std::fprintf(stderr, "simulated NCCL: rank %d waits for %zu bytes of rank %d, which sent %zu\n",
                 rank_, part.piece.bytes, from, static_cast<std::size_t>(part.announced));
  part.is_stuck = true;
  return false;
}

Progress Transfer::go_on() {
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
        if (!has_ended(peer, parts.front())) break;
        parts.pop_front();
      }
      all = all && parts.empty();
    };
    move(going, &Transfer::send);
    move(coming, &Transfer::receive);
  }
  return all ? Progress::ended : any ? Progress::some : Progress::none;
}

}  // namespace longspan::simulated
