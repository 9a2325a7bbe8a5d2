#include "comm/transport.hpp"

#include <fmt/format.h>

#include <utility>

#include "longspan/error.hpp"
#include "longspan/storage.hpp"

namespace longspan::comm {
namespace {

[[noreturn]] void refuse_puts(const char* step) {
  throw UsageError(
      fmt::format("'{}': rows can be put into a receive buffer of this communicator alone.", step));
}

}  // namespace

Collective Transport::shift_of(const void* send, std::size_t sent, void* recv, std::size_t received,
                               int distance) const {
  if (distance % size() == 0 && sent != received)
    throw UsageError(
        fmt::format("A shift by {} of {} ranks was asked for, which is from each rank to itself, "
                    "of {} bytes sent and {} received: they must be the same.",
                    distance, size(), sent, received));
  return {.kind = Collective::shift,
          .send = send,
          .recv = recv,
          .bytes = sent,
          .received = received,
          .place = distance};
}

PutRanks Transport::begin_puts(const std::byte*, Stream, const char* step) { refuse_puts(step); }
void Transport::end_puts(const std::byte*, std::size_t, Stream, const char* step) {
  refuse_puts(step);
}

const Levels& Transport::levels(int ranks_per_node) {
  const auto known = levels_.find(ranks_per_node);
  if (known != levels_.end()) return known->second;
  const int node = rank() / ranks_per_node, place = rank() % ranks_per_node;
  Levels made{split(node, place), split(place, node)};
  made.node->end_with_parent();
  made.nodes->end_with_parent();
  return levels_.emplace(ranks_per_node, std::move(made)).first->second;
}

std::uint64_t Transport::received_bytes() const {
  std::uint64_t all = received_bytes_;
  for (const auto& [ranks_per_node, levels] : levels_)
    all += levels.node->received_bytes() + levels.nodes->received_bytes();
  return all;
}

Collective Transport::sum_of(const void* send, void* recv, std::size_t count, DType dtype) {
  if (dtype != fp32 && dtype != fp16 && dtype != bf16)
    throw Unsupported(fmt::format(
        "A reduce_scatter of {} was asked for, but sums are of fp32, fp16 or bf16.", name(dtype)));
  return {.kind = Collective::reduce_scatter,
          .send = send,
          .recv = recv,
          .bytes = count * size_of(dtype),
          .dtype = dtype};
}

}  // namespace longspan::comm
