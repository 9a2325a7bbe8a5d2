#include "comm/transport.hpp"

#include <fmt/format.h>

#include "longspan/error.hpp"

namespace longspan::comm {

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

Collective Transport::from_root(void* data, std::size_t bytes, int root) const {
  if (root < 0 || root >= size())
    throw UsageError(fmt::format(
        "A broadcast from rank {} was asked for, but the ranks are 0 to {}.", root, size() - 1));
  return {.kind = Collective::broadcast, .send = data, .recv = data, .bytes = bytes, .place = root};
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
