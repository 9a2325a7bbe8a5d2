// A rank that fails in the middle of its work: its transport replaces another's, but does not begin
// one shift, or one exchange by puts: its own, or that of a child.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "comm/transport.hpp"
#include "longspan/communicator.hpp"

namespace longspan::tests {

class StumblingTransport final : public comm::Transport {
 public:
  StumblingTransport(Communicator whole, std::function<void()> stumble)
      : StumblingTransport(std::move(whole), std::move(stumble), std::make_shared<int>(0)) {}

  /// Calls `stumble` in place of the n-th of them from now on, with one piece or several.
  void stumble_at(int shift) { *left_ = shift; }

  comm::Transfers start_shifts(std::span<const comm::Piece> pieces, int distance, Stream stream,
                               const char* step) override {
    count_shift();
    return inner().start_shifts(pieces, distance, stream, step);
  }
  PutRanks begin_puts(const std::byte* buffer, Stream stream, const char* step) override {
    count_shift();
    return inner().begin_puts(buffer, stream, step);
  }
  void end_puts(const std::byte* buffer, std::size_t received, Stream stream,
                const char* step) override {
    inner().end_puts(buffer, received, stream, step);
  }
  std::byte* place_at(std::byte* place, int rank) override { return inner().place_at(place, rank); }
  void keep_place(Stream stream, int starts) override { inner().keep_place(stream, starts); }
  void forget_place() noexcept override { inner().forget_place(); }

  int rank() const override { return inner().rank(); }
  int size() const override { return inner().size(); }
  Device device() const override { return inner().device(); }
  int gpu() const override { return inner().gpu(); }
  std::chrono::milliseconds deadline() const override { return inner().deadline(); }
  std::string describe() const override { return inner().describe(); }
  std::string name_of(int rank) const override { return inner().name_of(rank); }
  std::shared_ptr<comm::Transport> split(int color, int key) override {
    const auto part = whole_.split(color, key);
    if (!part) return nullptr;
    return std::shared_ptr<comm::Transport>(new StumblingTransport(*part, stumble_, left_));
  }
  std::shared_ptr<std::byte> open_receive_buffer(std::size_t bytes, std::string& why) override {
    return inner().open_receive_buffer(bytes, why);
  }
  std::uint32_t enlist(const std::shared_ptr<const comm::RunLog>& log) override {
    return inner().enlist(log);
  }
  void begin(comm::RunName run) override { inner().begin(run); }
  void refuse(const NamedValues& given, const std::string& why) override {
    inner().refuse(given, why);
  }
  void disagree(comm::RunName run, int rank, const char* step) override {
    inner().disagree(run, rank, step);
  }
  void check(const char* step) override { inner().check(step); }
  void wait(Stream stream, const char* step) override { inner().wait(stream, step); }
  std::vector<std::string> gather(const std::string& mine, const std::string& step) override {
    return inner().gather(mine, step);
  }
  void abort(const std::string& why) noexcept override { inner().abort(why); }

 protected:
  int start(const comm::Collective& c, Stream stream, const char* step) override {
    if (c.kind == comm::Collective::shift) {
      count_shift();
      open_.push_back(
          inner().start_shift(c.send, c.bytes, c.recv, c.received, c.place, stream, step));
    } else if (c.kind == comm::Collective::all_to_all) {
      open_.push_back(inner().start_all_to_all(c.send, c.recv, c.bytes, stream, step, c.digests));
    } else {
      open_.push_back(inner().start_all_gather(c.send, c.recv, c.bytes, stream, step, c.digests));
    }
    return static_cast<int>(open_.size()) - 1;
  }
  void finish(int number, Stream stream) override { of(number).wait(stream); }
  bool test(int number) override { return of(number).test(); }
  void drop(int number) noexcept override { of(number) = {}; }

 private:
  StumblingTransport(Communicator whole, std::function<void()> stumble, std::shared_ptr<int> left)
      : whole_(std::move(whole)), stumble_(std::move(stumble)), left_(std::move(left)) {}

  void count_shift() {
    if (*left_ > 0 && --*left_ == 0) stumble_();
  }
  comm::Transport& inner() const { return comm::transport_of(whole_); }
  comm::Transfer& of(int number) { return open_[static_cast<std::size_t>(number)]; }

  Communicator whole_;
  std::function<void()> stumble_;
  std::shared_ptr<int> left_;
  std::vector<comm::Transfer> open_;
};

}  // namespace longspan::tests
