// One process alone on its GPU: every collective is a copy on a stream.
#include "comm/self.hpp"

#include "comm/cuda/side_stream.hpp"
#include "comm/cuda/stream.hpp"
#include "comm/gpu.hpp"
#include "longspan/error.hpp"
#include "longspan/info.hpp"
#include "src/base/device_guard.hpp"

namespace longspan::comm {
namespace {

class GpuSelf final : public SelfTransport {
 public:
  template <class What>
  GpuSelf(What what, int gpu) : SelfTransport(std::move(what)), gpu_(gpu) {}
  Device device() const override { return Device::cuda; }
  int gpu() const override { return gpu_; }
  std::string describe() const override { return name_of_gpu(gpu_) + " | 1 rank"; }

  void wait(Stream stream, const char* step) override {
    control().outcome().check();
    Patience patient(deadline());
    wait_for_stream(cuda(stream), patient, [&] {
      if (patient.over()) control().timed_out(step, patient.waited());
    });
  }

 protected:
  void run(const Collective& collective, Stream stream, const char*) override {
    control().outcome().check();
    copy_on(cuda(stream), collective.send, collective.recv, collective.bytes);
  }
  int start(const Collective& collective, Stream stream, const char*) override {
    control().outcome().check();
    side_.make();
    return side_.start(cuda(stream), [&](cudaStream_t side) {
      copy_on(side, collective.send, collective.recv, collective.bytes);
    });
  }
  void finish(int number, Stream stream) override {
    side_.give_back(number);
    control().outcome().check();
    side_.join(number, cuda(stream));
  }
  bool test(int number) override {
    control().outcome().check();
    return side_.is_done(number);
  }
  void drop(int number) noexcept override { side_.give_back(number); }

  std::shared_ptr<Transport> branch(const Group& group) override {
    if (group.members.empty()) return nullptr;
    return std::make_shared<GpuSelf>(control().branch(group), gpu_);
  }

 private:
  int gpu_;
  SideStream side_;
};

}  // namespace

std::shared_ptr<Transport> gpu_self(milliseconds deadline, int gpu) {
  if (gpu_count() == 0)
    throw Unsupported(
        "Device cuda was asked for, but this process sees no GPU: check nvidia-smi and "
        "CUDA_VISIBLE_DEVICES, or use device host.");
  check_gpu(gpu, gpu_count());
  return std::make_shared<GpuSelf>(deadline, gpu >= 0 ? gpu : current_gpu());
}

}  // namespace longspan::comm
