// The gradients of biases, which rows of one head, or of all, add up to.
#include "kernels/cuda/arch/shared.cuh"
#include "kernels/cuda/common/launch.hpp"
#include "kernels/cuda/gradients/fp32.cuh"
#include "kernels/cuda/gradients/gradients.hpp"
#include "kernels/cuda/gradients/sums.hpp"

namespace longspan::kernels::cuda {
namespace {

constexpr int kThreads = 256;

/// A block takes a head. Sums of a sequence are float64, and so are those of all sequences that
/// share a slope.
__global__ void add_slope_gradients_kernel(const __grid_constant__ GradientParams p,
                                           const double* rows) {
  auto& parts = arch::shared_variable<double[kThreads]>();
  const int group = group_of(p), head = static_cast<int>(blockIdx.x);
  const int thread = static_cast<int>(threadIdx.x);
  double all = 0;
  for (int b = 0; b < p.batch.size; ++b) {
    const std::int64_t count = p.batch.query_len(b, p.tokens);
    const double* const of_b =
        rows + (head / group * p.tokens + p.batch.first_row(b)) * group + head % group;
    double sum = 0;
    for (std::int64_t t = thread; t < count; t += kThreads) sum += of_b[t * group];
    __syncthreads();  // the last sequence's parts are read
    parts[thread] = sum;
    for (int half = kThreads / 2; half > 0; half /= 2) {
      __syncthreads();
      if (thread < half) parts[thread] += parts[thread + half];
    }
    if (thread > 0) continue;
    if (p.biases.slope_stride > 0)
      p.biases.slopes[b * p.biases.slope_stride + head] += static_cast<float>(parts[0]);
    all += parts[0];
  }
  if (thread == 0 && p.biases.slope_stride == 0) p.biases.slopes[head] += static_cast<float>(all);
}

// ---- qq_bias --------------------------------------------------------------------------------

constexpr int kEntries = 64;  // of a row and of a column of a tile of the matrix

struct QqShared {
  RowSlots<kEntries> rows;
  KeySlots<kEntries> keys;
  Interval tokens;  // of the sequence, whose rows the tile has
  float slice[kFp32Floats];
};

/// A block takes a tile of the matrix, which all sequences and heads share, and adds up the dS of
/// each entry: sequence by sequence, head by head.
class QqTile {
 public:
  __device__ QqTile(const GradientParams& p, QqShared& shared)
      : p_(p),
        shared_(shared),
        rule_(p),
        first_row_(std::int64_t{blockIdx.y} * kEntries),
        first_column_(std::int64_t{blockIdx.x} * kEntries) {}

  __device__ void run() {
    for (int b = 0; b < p_.batch.size; ++b) {
      const Sequence sequence = sequence_of(p_, b);
      __syncthreads();  // the last sequence's tokens are read
      if (threadIdx.x == 0) find_tokens(sequence);
      __syncthreads();
      if (shared_.tokens.empty() || sequence.local_len == 0 ||
          sequence.context_len + first_column_ >= sequence.kv_len)
        continue;
      for (int head = 0; head < p_.heads; ++head) {
        __syncthreads();  // the last head's slots are read
        find_slots(sequence, head);
        add_head(sequence);  // behind a barrier
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const std::int64_t row = first_row_ + fp32_y() + 16 * i;
        const std::int64_t column = first_column_ + fp32_x() + 16 * j;
        if (row < p_.bias.qq.width && column < p_.bias.qq.width)
          p_.biases.qq[row * p_.biases.qq_stride + column] += sums_[i][j];
      }
  }

 private:
  /// A thread finds the tokens whose indices are rows of the tile: the indices ascend.
  __device__ void find_tokens(const Sequence& sequence) {
    const std::int64_t count = p_.batch.query_len(sequence.index, p_.tokens);
    const auto first_at = [&](std::int64_t index) {
      std::int64_t low = 0, high = count;
      while (low < high) {
        const std::int64_t middle = low + (high - low) / 2;
        if (p_.query_index(sequence.index, middle) < index)
          low = middle + 1;
        else
          high = middle;
      }
      return low;
    };
    shared_.tokens = {first_at(first_row_), first_at(first_row_ + kEntries)};
  }

  /// The rows and keys of the entries, of which this rank may lack some.
  __device__ void find_slots(const Sequence& sequence, int head) {
    const int i = static_cast<int>(threadIdx.x);
    const Shard shard = p_.shard.for_sequence(sequence.index);
    View view;
    view.any = {0, sequence.local_len};
    view.positions = {0, sequence.kv_len};
    if (shard.layout == Layout::listed) view.table = shard.table;
    const int kv_head = head / group_of(p_);
    const std::int64_t first_position = sequence.context_len + first_column_;
    if (i < kEntries) {
      shared_.rows.set(i, p_, sequence, {shared_.tokens.begin, head}, false);
      const std::int64_t position = first_position + i;
      const bool owns = view.table == nullptr && shard.owns(position, sequence.kv_len);
      const std::int64_t key = owns ? shard.before(position, sequence.kv_len) : 0;
      shared_.keys.set(i, p_, sequence, kv_head, key, owns, view);
    }
    __syncthreads();
    const std::int64_t token = shared_.tokens.begin + i;
    if (token < shared_.tokens.end) {
      const std::int64_t index = p_.query_index(sequence.index, token);
      shared_.rows.set(static_cast<int>(index - first_row_), p_, sequence, {token, head}, true);
    }
    if (view.table == nullptr) return;
    for (std::int64_t key = i; key < sequence.local_len; key += kFp32Threads) {
      const std::int64_t entry = view.table[key] - first_position;
      if (entry >= 0 && entry < kEntries)
        shared_.keys.set(static_cast<int>(entry), p_, sequence, kv_head, key, true, view);
    }
  }

  __device__ void add_head(const Sequence& sequence) {
    const RowSlots<kEntries>& rows = shared_.rows;
    const KeySlots<kEntries>& keys = shared_.keys;
    float s[4][4] = {}, g[4][4] = {};
    add_fp32_products(s, shared_.slice, {p_.q.data, p_.q_dtype, p_.head_dim, false}, rows.first_at,
                      {p_.k.data, p_.kv_dtype, p_.head_dim, false}, keys.first_at);
    add_fp32_products(g, shared_.slice, {p_.dout.data, p_.dout_dtype, p_.value_dim, false},
                      rows.second_at, {p_.v.data, p_.kv_dtype, p_.value_dim, false},
                      keys.second_at);
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int row = fp32_y() + 16 * i, key = fp32_x() + 16 * j;
        const float bias =
            bias_of(p_, sequence.index, rows.index[row], rows.head[row], keys.column[key]);
        const float kept = rule_.drops ? kept_of(p_, rule_, sequence, rows.index[row],
                                                 rows.head[row], keys.column[key])
                                       : 1.0f;
        sums_[i][j] +=
            weigh(rule_, s[i][j], g[i][j], bias, kept, rows.view[row].contains(keys.place[key]),
                  rows.lse[row], rows.lse_low[row], rows.d[row], [](float e) { return exp2f(e); })
                .ds;
      }
  }

  const GradientParams& p_;
  QqShared& shared_;
  const ScoreRule rule_;
  const std::int64_t first_row_, first_column_;
  float sums_[4][4] = {};
};

__global__ __launch_bounds__(kFp32Threads) void add_qq_gradients_kernel(
    const __grid_constant__ GradientParams p) {
  QqTile(p, arch::shared_variable<QqShared>()).run();
}

}  // namespace

void load_bias_gradients() {
  load_code(add_slope_gradients_kernel);
  load_code(add_qq_gradients_kernel);
}

void add_qq_gradients(const GradientParams& p, cudaStream_t stream) {
  const auto tiles = static_cast<unsigned>((p.bias.qq.width + kEntries - 1) / kEntries);
  launch_kernel(add_qq_gradients_kernel, {dim3(tiles, tiles), dim3(kFp32Threads), stream}, p);
}

void add_slope_gradients(const GradientParams& p, const double* rows, cudaStream_t stream) {
  launch_kernel(add_slope_gradients_kernel,
                {dim3(static_cast<unsigned>(p.heads)), dim3(kThreads), stream}, p, rows);
}

}  // namespace longspan::kernels::cuda
