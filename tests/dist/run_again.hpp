// One layer that runs repeatedly with other inputs, by itself and as a graph: nothing of an earlier
// run may be left in memory that the peers write.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tests/dist/layer_run.hpp"
#include "tests/dist/replay.hpp"

namespace longspan::tests {

/// Runs a layer with such options as often as `is_eager` has turns, and compares each with float64.
/// Rows and keys of the one sequence are equally many, and dealt out in zigzag.
inline void expect_right_again_and_again(const Communicator& world, const Shape& shape,
                                         const Options& options, std::uint64_t seed,
                                         const std::vector<bool>& is_eager) {
  const Device device = world.device();
  const std::int64_t length = shape.kv_lens[0];
  const Shard own = Shard::zigzag(length, world.rank(), world.size());
  const std::int64_t rows = own.local_len(length);
  const std::size_t bytes =
      static_cast<std::size_t>(rows * shape.heads * shape.dim) * size_of(shape.dtype);
  Buffer q(device, bytes), k(device, bytes), v(device, bytes), out(device, bytes);
  const auto tensor = [&](const Buffer& memory) {
    return Tensor(memory.data(), shape.dtype, {rows, shape.heads, shape.dim}, device);
  };
  Attention layer(world, options);
  const AttentionArgs args{.q = tensor(q),
                           .k = tensor(k),
                           .v = tensor(v),
                           .out = tensor(out),
                           .total_keys = length,
                           .total_tokens = length};
  Replay replay(device, [&](Stream stream) { layer.run(args, stream); });
  for (std::size_t turn = 0; turn < is_eager.size(); ++turn) {
    const Problem problem(shape, seed + turn);
    q.upload(problem.share_rows(own).data());
    k.upload(problem.share_keys(own).data());
    v.upload(problem.share_values(own).data());
    out.upload(std::vector<std::byte>(bytes, std::byte{0xff}).data());
    is_eager[turn] ? replay.eager() : replay.again();
    layer.wait(replay.stream());
    EXPECT_LE(problem.max_error(to_host(out, bytes), own_rows(problem, own)), problem.tolerance());
  }
}

}  // namespace longspan::tests
