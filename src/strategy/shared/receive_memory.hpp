// The memory of a strategy that other GPUs write, if they can reach it.
#pragma once

#include <cstddef>
#include <memory>

#include "src/strategy/strategy.hpp"

namespace longspan {

/// Opens a receive buffer for the parts that lay_out(memory) takes, and lays them out in it;
/// `lay_out` is called once before, to count. Null if no buffer is possible; `info` then has the
/// reason, otherwise the buffer's size. Collective. Throws Unsupported if the options ask for one
/// that is not possible.
template <class LayOut>
std::shared_ptr<std::byte> open_receive_memory(const LayerContext& layer, ExchangeInfo& info,
                                               const LayOut& lay_out) {
  Parts counted;
  lay_out(counted);
  std::shared_ptr<std::byte> buffer = layer.comm.open_receive_buffer(counted.bytes, info.reason);
  require_exchange(layer.options, buffer != nullptr, info.reason);
  if (!buffer) return nullptr;
  info.by = Exchange::peer_buffers;
  info.peer_bytes = counted.bytes;
  Parts memory{buffer.get()};
  lay_out(memory);
  return buffer;
}

}  // namespace longspan
