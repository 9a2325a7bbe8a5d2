#include "comm/nccl/transport.hpp"

#include <fmt/format.h>

#include "comm/controlled.hpp"
#include "comm/gpu.hpp"
#include "comm/nccl/windows.hpp"
#include "comm/self.hpp"
#include "longspan/buffer.hpp"
#include "longspan/info.hpp"
#include "src/check.hpp"

namespace longspan::comm {
namespace {

std::string version_text(int code) {
  return fmt::format("{}.{}.{}", code / 10000, code % 10000 / 100, code % 100);
}

/// The library that runs may be another than the one whose header was compiled.
std::string library_name() {
  int found = 0;
  ncclGetVersion(&found);
  std::string name = "NCCL " + version_text(found);
  if (found / 100 != NCCL_VERSION_CODE / 100)
    name += fmt::format(" (longspan was built with {}: expect trouble)",
                        version_text(NCCL_VERSION_CODE));
  return name;
}

std::string gpu_name() {
  int device = 0;
  cudaDeviceProp properties{};
  LONGSPAN_CUDA(cudaGetDevice(&device));
  LONGSPAN_CUDA(cudaGetDeviceProperties(&properties, device));
  return properties.name;
}

void copy_on(Stream stream, const void* from, void* to, std::size_t bytes) {
  if (from != to && bytes > 0)
    LONGSPAN_CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, cuda(stream)));
}

class NcclTransport final : public ControlledTransport {
 public:
  NcclTransport(std::shared_ptr<Link> link, std::unique_ptr<Control> control, const Place& place)
      : ControlledTransport(std::move(control)), link_(std::move(link)), place_(place) {}

  /// The end of NCCL's communicator waits for the peers.
  ~NcclTransport() override { control().flush(); }

  Device device() const override { return Device::cuda; }
  std::string describe() const override {
    return fmt::format("{} | {} | {}", library_name(), gpu_name(), comm::describe(size(), place_));
  }

  void all_gather(const void* send, void* recv, std::size_t bytes, Stream stream,
                  const char* step) override {
    link_->queue(control(), cuda(stream), step, [&](ncclComm_t comm) {
      return ncclAllGather(send, recv, bytes, ncclInt8, comm, cuda(stream));
    });
  }

  void all_to_all(const void* send, void* recv, std::size_t bytes, Stream stream,
                  const char* step) override {
    link_->queue(control(), cuda(stream), step, [&](ncclComm_t comm) {
      ncclGroupStart();
      for (int p = 0; p < size(); ++p) {
        const auto at = static_cast<std::size_t>(p) * bytes;
        ncclSend(static_cast<const char*>(send) + at, bytes, ncclInt8, p, comm, cuda(stream));
        ncclRecv(static_cast<char*>(recv) + at, bytes, ncclInt8, p, comm, cuda(stream));
      }
      return ncclGroupEnd();  // an error of any call in the group comes out here
    });
  }

  void shift(const void* send, void* recv, std::size_t bytes, int distance, Stream stream,
             const char* step) override {
    const int ahead = (distance % size() + size()) % size();
    if (ahead == 0) {
      control().fate().check();
      return copy_on(stream, send, recv, bytes);
    }
    link_->queue(control(), cuda(stream), step, [&](ncclComm_t comm) {
      ncclGroupStart();
      ncclSend(send, bytes, ncclInt8, (rank() + ahead) % size(), comm, cuda(stream));
      ncclRecv(recv, bytes, ncclInt8, (rank() - ahead + size()) % size(), comm, cuda(stream));
      return ncclGroupEnd();
    });
  }

  std::shared_ptr<const PeerView> open_windows(std::size_t bytes, std::string& why) override {
    std::shared_ptr<Windows> windows = Windows::open(*this, bytes, why);
    if (!windows) return nullptr;
    windows_.push_back(windows);
    return {windows, &windows->view()};
  }

  void wait(Stream stream, const char* step) override {
    try {
      link_->wait(control(), cuda(stream), step);
      for_windows([&](Windows& windows) { check(windows.report(), step); });
    } catch (...) {
      for_windows([](Windows& windows) { windows.abort(); });
      throw;
    }
  }

  void abort(const std::string& why) noexcept override {
    ControlledTransport::abort(why);
    for_windows([](Windows& windows) { windows.abort(); });
    link_->abort();
  }

 private:
  template <class Use>
  void for_windows(const Use& use) {
    for (const std::weak_ptr<Windows>& one : windows_)
      if (const std::shared_ptr<Windows> windows = one.lock()) use(*windows);
  }

  void check(const PeerReport& report, const char* step) {
    if (report.kind == PeerReport::none) return;
    if (report.kind == PeerReport::differs)
      control().fail({ErrorKind::usage, static_cast<int>(report.rank), step,
                      fmt::format("Rank {} exchanges other states than rank {} at '{}': every rank "
                                  "must run with the same tokens, batch, shard and options.",
                                  report.rank, rank(), step)});
    control().fate().check();
    control().timed_out(step, control().patience());  // the roll call says who is missing
  }

  std::shared_ptr<Link> link_;
  Place place_;
  std::vector<std::weak_ptr<Windows>> windows_;
};

class GpuSelf final : public SelfTransport {
 public:
  using SelfTransport::SelfTransport;
  Device device() const override { return Device::cuda; }
  std::string describe() const override { return gpu_name() + " | 1 rank"; }

  void wait(Stream stream, const char* step) override {
    control().fate().check();
    Patience patient(deadline());
    wait_for_stream(cuda(stream), patient, [&] {
      if (patient.over()) control().timed_out(step, patient.waited());
    });
  }

 protected:
  void copy(const void* from, void* to, std::size_t bytes, Stream stream) override {
    copy_on(stream, from, to, bytes);
  }
};

}  // namespace

std::shared_ptr<Transport> nccl_transport(std::shared_ptr<Link> link,
                                          std::unique_ptr<Control> control, const Place& place) {
  auto transport = std::make_shared<NcclTransport>(std::move(link), std::move(control), place);
  const Buffer first(Device::cuda, 16), all(Device::cuda, 16 * transport->size());
  transport->all_gather(first.data(), all.data(), 16, {}, "first exchange");
  transport->wait({}, "first exchange");
  return transport;
}

std::shared_ptr<Transport> gpu_self(milliseconds deadline) {
  if (gpu_count() == 0)
    throw Unsupported(
        "Device cuda was asked for, but this process sees no GPU: check nvidia-smi and "
        "CUDA_VISIBLE_DEVICES, or use device host.");
  return std::make_shared<GpuSelf>(deadline);
}

}  // namespace longspan::comm
