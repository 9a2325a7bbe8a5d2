// Runs of a layer with arguments in memory of this host: on a GPU a call takes copies of them, and
// what it has written comes back.
#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <type_traits>
#include <utility>
#include <vector>

#include "longspan/attention.hpp"
#include "longspan/buffer.hpp"
#include "longspan/option_table.hpp"
#include "longspan/storage.hpp"

namespace longspan::tests {

/// The bytes from the first element of a tensor to its last one.
inline std::size_t span_bytes(const Tensor& t) {
  if (t.size() == 0) return 0;
  std::int64_t last = 0;
  for (int d = 0; d < t.dims; ++d) last += (t.shape[d] - 1) * t.stride[d];
  return static_cast<std::size_t>(last + 1) * size_of(t.dtype);
}

/// Copies of tensors on a GPU; on a host the tensors themselves. Tensors of one address stay so.
class DeviceCopies {
 public:
  explicit DeviceCopies(Device device) : device_(device) {}

  Tensor of(Tensor t) {
    if (device_ == Device::host || t.dims == 0) return t;
    t.device = device_;
    if (!t) return t;  // without elements
    const std::size_t bytes = span_bytes(t);
    Copy& copy = copies_[t.data];
    if (copy.memory.bytes() < bytes || copy.memory.data() == nullptr) {
      old_.push_back(std::move(copy.memory));  // others may still point there
      copy = {Buffer(device_, bytes + 16), bytes};
      if (bytes > 0) copy.memory.upload(padded(t.data, bytes, copy.memory.bytes()).data());
    }
    t.data = copy.memory.data();
    return t;
  }
  AttentionArgs of(AttentionArgs args) {
    visit_arguments(args, [&](const ArgumentInfo&, auto& member) {
      if constexpr (std::is_same_v<std::remove_cvref_t<decltype(member)>, Tensor>)
        member = of(member);
      else if constexpr (std::is_same_v<std::remove_cvref_t<decltype(member)>, Lse>)
        member.tensor = of(member.tensor);
    });
    return args;
  }
  GradientArgs of(GradientArgs args) {
    args.run = of(args.run);
    args.dlse.tensor = of(args.dlse.tensor);
    for (Tensor* t :
         {&args.dout, &args.dq, &args.dk, &args.dv, &args.dsinks, &args.dslopes, &args.dqq_bias})
      *t = of(*t);
    return args;
  }
  /// Copies a tensor back to where it came from.
  void take_back(const Tensor& host) const {
    if (device_ == Device::host || !host || host.size() == 0) return;
    const Buffer& memory = copies_.at(host.data).memory;
    std::vector<std::byte> bytes(memory.bytes());
    memory.download(bytes.data());
    std::memcpy(host.data, bytes.data(), span_bytes(host));
  }

 private:
  struct Copy {
    Buffer memory;
    std::size_t bytes = 0;
  };
  static std::vector<std::byte> padded(const void* data, std::size_t bytes, std::size_t all) {
    std::vector<std::byte> values(all, std::byte{0xff});
    std::memcpy(values.data(), data, bytes);
    return values;
  }

  Device device_;
  std::map<void*, Copy> copies_;
  std::vector<Buffer> old_;
};

/// Runs, and on a GPU waits.
inline void run_layer(Attention& layer, const AttentionArgs& args) {
  const Device device = layer.world().device();
  DeviceCopies copies(device);
  layer.run(copies.of(args));
  if (device == Device::host) return;
  layer.wait();
  copies.take_back(args.out);
  copies.take_back(args.lse.tensor);
}

inline void run_backward(Attention& layer, const GradientArgs& args) {
  const Device device = layer.world().device();
  DeviceCopies copies(device);
  layer.backward(copies.of(args));
  if (device == Device::host) return;
  layer.wait();
  for (const Tensor* t :
       {&args.dq, &args.dk, &args.dv, &args.dsinks, &args.dslopes, &args.dqq_bias})
    copies.take_back(*t);
}

}  // namespace longspan::tests
