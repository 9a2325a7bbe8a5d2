// How ranks find each other over TCP, among strangers. A program that talks to rank 0's port, or
// listens in rank 0's place, costs little, ends nothing, and gets the reason if it is a rank.
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <future>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "comm/control/wire.hpp"
#include "comm/tcp/address.hpp"
#include "comm/tcp/control.hpp"
#include "comm/tcp/hello.hpp"
#include "comm/tcp/hub.hpp"
#include "longspan/error.hpp"
#include "tests/support/free_port.hpp"
#include "tests/support/fresh_seed.hpp"
#include "tests/support/no_threads.hpp"

namespace {
/// Look-ups of a name that ends in ".silent", and the condition that they wait for: a name server
/// that does not answer.
std::atomic<int> silent_lookups{0};
std::atomic<int> all_lookups{0};              // of names, and not of addresses in digits
auto& name_server = *new std::promise<void>;  // look-ups that it keeps waiting outlive the tests
auto& answered = *new std::shared_future<void>(name_server.get_future().share());
}  // namespace

/// Replaces the system's, which it calls for other names.
extern "C" int getaddrinfo(const char* name, const char* service, const addrinfo* hints,
                           addrinfo** found) {
  const bool asks = !(hints && hints->ai_flags & AI_NUMERICHOST);
  if (asks) ++all_lookups;
  if (asks && name && std::string_view(name).ends_with(".silent")) {
    ++silent_lookups;
    answered.wait();
    return EAI_AGAIN;
  }
  static const auto real =
      reinterpret_cast<decltype(&getaddrinfo)>(::dlsym(RTLD_NEXT, "getaddrinfo"));
  return real(name, service, hints, found);
}

namespace longspan::comm {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::Not;
using tests::free_port;
using Strings = std::vector<std::string>;

constexpr auto kWait = [] {
  std::this_thread::sleep_for(1ms);
  return true;
};

sockaddr_in loopback(int port, const char* digits = "\x7f\0\0\1") {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  std::memcpy(&address.sin_addr, digits, 4);
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  return address;
}

int port_of(int fd) {
  sockaddr_storage here{};
  socklen_t length = sizeof here;
  ::getsockname(fd, reinterpret_cast<sockaddr*>(&here), &length);
  return ntohs(here.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(here).sin6_port
                                          : reinterpret_cast<sockaddr_in&>(here).sin_port);
}

/// A socket that listens, and its port.
Fd some_listener() {
  Fd fd(::socket(AF_INET, SOCK_STREAM, 0));
  const sockaddr_in here = loopback(0);
  ::bind(fd.get(), reinterpret_cast<const sockaddr*>(&here), sizeof here);
  ::listen(fd.get(), 16);
  return fd;
}

Launch launch_of(int port, int rank, int size = 2, const char* address = "localhost") {
  return {Launcher::torchrun, rank, size, address, port};
}

/// Sets a variable of the environment until the end of the scope.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) { ::setenv(name, value, 1); }
  ~Variable() { ::unsetenv(name_); }

 private:
  const char* name_;
};

std::string header(std::uint32_t kind, std::uint32_t peer, std::uint32_t bytes,
                   std::uint32_t magic = 0x4c53504e) {
  const std::uint32_t words[] = {magic, kind, peer, bytes};
  return std::string(reinterpret_cast<const char*>(words), sizeof words);
}
std::string framed(std::uint32_t kind, std::uint32_t peer, const std::string& body = "") {
  return header(kind, peer, static_cast<std::uint32_t>(body.size())) + body;
}

/// One end of a connection with bytes from the test.
class Stranger {
 public:
  explicit Stranger(Fd fd) : fd_(std::move(fd)) {}
  explicit Stranger(int port, const char* digits = "\x7f\0\0\1")
      : fd_(::socket(AF_INET, SOCK_STREAM, 0)) {
    const sockaddr_in there = loopback(port, digits);
    connected_ = ::connect(fd_.get(), reinterpret_cast<const sockaddr*>(&there), sizeof there) == 0;
  }
  bool connected() const { return connected_; }

  /// How many of `bytes` were accepted; fewer when the other side has hung up.
  std::size_t send(const std::string& bytes) {
    std::size_t sent_bytes = 0;
    while (sent_bytes < bytes.size()) {
      const ssize_t sent =
          ::send(fd_.get(), bytes.data() + sent_bytes, bytes.size() - sent_bytes, MSG_NOSIGNAL);
      if (sent <= 0) break;
      sent_bytes += static_cast<std::size_t>(sent);
    }
    return sent_bytes;
  }

  /// `bytes` received, or fewer if the other side hangs up or half a minute passes.
  std::string receive(std::size_t bytes) {
    std::string received;
    while (received.size() < bytes) {
      pollfd wait{fd_.get(), POLLIN, 0};
      char some[4096];
      if (::poll(&wait, 1, 30'000) <= 0) break;
      const ssize_t got =
          ::recv(fd_.get(), some, std::min(sizeof some, bytes - received.size()), 0);
      if (got <= 0) break;
      received.append(some, static_cast<std::size_t>(got));
    }
    return received;
  }

  /// Whether the other side hangs up, without sending anything, within half a minute.
  bool is_hung_up_on() {
    pollfd wait{fd_.get(), POLLIN, 0};
    char byte;
    return ::poll(&wait, 1, 30'000) > 0 && ::recv(fd_.get(), &byte, 1, 0) <= 0;
  }

 private:
  Fd fd_;
  bool connected_ = true;
};

std::string hello_text(int port, int rank, int size = 2) {
  return framed(Frame::hello, 0, to_text(hello_of(launch_of(port, rank, size))));
}

/// The ranks of a job still meet.
void expect_meeting(Control& zero, int port) {
  std::thread other([port] {
    try {
      const auto one = tcp_control(launch_of(port, 1), 50s);
      EXPECT_EQ(one->gather("b", "meet"), (Strings{"a", "b"}));
    } catch (const Error& error) {
      ADD_FAILURE() << error.what();
    }
  });
  EXPECT_EQ(zero.gather("a", "meet"), (Strings{"a", "b"}));
  other.join();
}

/// The answer to a rank that comes now.
std::string refusal_of(const Launch& launch) {
  try {
    tcp_control(launch, 20s);
  } catch (const UsageError& error) {
    return error.what();
  }
  return "let in";
}

TEST(Strangers, SpeakBrieflyBeforeTheyAreKnown) {
  const int port = free_port();
  const auto zero = tcp_control(launch_of(port, 0), 50s);
  const std::size_t most = 64 << 20;
  for (const std::string& opening :
       {header(Frame::hello, 1, 1u << 30), header(Frame::hello, 1, 4097),
        header(Frame::text, 1, 1u << 30), std::string()}) {
    Stranger endless(port);
    std::string stream = opening;
    stream.resize(most, 'x');
    EXPECT_LT(endless.send(stream), most);
    EXPECT_TRUE(endless.is_hung_up_on());
  }
  expect_meeting(*zero, port);
}

TEST(Strangers, WhoSayNothingAreSentAwayAndKeepNobodyOut) {
  const int port = free_port();
  const auto zero = tcp_control(launch_of(port, 0), 50s);
  std::vector<Stranger> idle;
  for (int i = 0; i < 100; ++i) idle.emplace_back(port);
  idle.emplace_back(port).send(hello_text(port, 1).substr(0, 20));  // never ends its hello
  expect_meeting(*zero, port);
  for (Stranger& stranger : idle) EXPECT_TRUE(stranger.is_hung_up_on());
}

TEST(Strangers, WhoSayAnythingAtRandomDoNotDisturb) {
  const unsigned seed = tests::fresh_seed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  const int port = free_port();
  const auto zero = tcp_control(launch_of(port, 0), 50s);
  for (int round = 0; round < 300; ++round) {
    Stranger stranger(port);
    std::string bytes(random() % 200, '\0');
    for (char& c : bytes) c = static_cast<char>(random());
    const std::uint32_t kind = random() % 9, peer = random() % 4;
    if (random() % 3 == 0) bytes = framed(kind, peer, bytes);
    if (random() % 3 == 0) bytes = framed(Frame::hello, peer, pack(bytes, bytes, bytes));
    stranger.send(bytes);
    if (random() % 2) stranger.send(bytes);
  }
  expect_meeting(*zero, port);
}

TEST(Seats, AreForConnectionsThatLive) {
  const int port = free_port();
  const auto zero = tcp_control(launch_of(port, 0), 50s);
  Stranger(port).send(hello_text(port, 1));  // hangs up after its hello
  {
    Stranger first(port);
    first.send(hello_text(port, 1));
    EXPECT_EQ(first.receive(16), header(Frame::welcome, 1, 0));
  }                       // hangs up without confirming its welcome
  Stranger second(port);  // is welcomed, and comes again on another connection
  second.send(hello_text(port, 1));
  EXPECT_EQ(second.receive(16), header(Frame::welcome, 1, 0));
  expect_meeting(*zero, port);
}

/// A welcomed guest stays, however many come after it: it already counts itself as a rank.
TEST(Seats, AreKeptForWhoIsWelcomed) {
  const int port = free_port();
  const auto zero = tcp_control(launch_of(port, 0), 50s);
  Stranger one(port);
  one.send(hello_text(port, 1));
  ASSERT_EQ(one.receive(16), header(Frame::welcome, 1, 0));
  std::vector<Stranger> idle;
  for (int i = 0; i < 100; ++i) idle.emplace_back(port);
  EXPECT_TRUE(idle.front().is_hung_up_on());
  one.send(framed(Frame::seated, 0) +
           framed(Frame::text, 0, "g" + pack(std::string("meet"), std::string("b"))));
  EXPECT_EQ(zero->gather("a", "meet"), (Strings{"a", "b"}));
}

/// A client that connects and resets the connection repeatedly, as fast as it can.
class Flood {
 public:
  explicit Flood(int port) {
    for (int i = 0; i < 2; ++i)
      threads_.emplace_back([this, port] {
        while (!stop_) {
          const Fd fd(::socket(AF_INET, SOCK_STREAM, 0));
          const linger reset{1, 0};
          ::setsockopt(fd.get(), SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
          const sockaddr_in there = loopback(port);
          ::connect(fd.get(), reinterpret_cast<const sockaddr*>(&there), sizeof there);
          ++came_;
        }
      });
  }
  ~Flood() {
    stop_ = true;
    for (std::thread& thread : threads_) thread.join();
    EXPECT_GT(came_, 0);
  }

 private:
  std::atomic<bool> stop_{false};
  std::atomic<long> came_{0};
  std::vector<std::thread> threads_;
};

TEST(Strangers, WhoComeInAFloodKeepNobodyOut) {
  for (int meeting = 0; meeting < 10; ++meeting) {
    const int port = free_port();
    const auto zero = tcp_control(launch_of(port, 0), 50s);
    const Flood flood(port);
    std::this_thread::sleep_for(5ms);
    expect_meeting(*zero, port);
  }
}

TEST(Seats, AreTakenOnceAndTheSecondIsToldSo) {
  const int port = free_port();
  const auto zero = tcp_control(launch_of(port, 0, 3), 50s);
  auto one = tcp_control(launch_of(port, 1, 3), 50s);
  EXPECT_THAT(refusal_of(launch_of(port, 1, 3)), HasSubstr("Rank 1 is here already"));
  EXPECT_THAT(refusal_of(launch_of(port, 0, 3)), Not(HasSubstr("let in")));  // the port, at least
  Stranger zeroth(port);
  zeroth.send(hello_text(port, 0, 3));
  EXPECT_THAT(zeroth.receive(1000), HasSubstr("Rank 0 is here already"));
  one.reset();
  EXPECT_THROW(zero->gather("", "meet"), RankError);  // rank 1 left
  try {  // rank 0 may go to another communicator soon: it is tried until the deadline
    tcp_control(launch_of(port, 1, 3), 500ms);
    ADD_FAILURE() << "let in";
  } catch (const RankError& error) {
    EXPECT_EQ(error.kind(), ErrorKind::timeout);
    EXPECT_THAT(error.what(), HasSubstr("Rank 1 was here and has left"));
  }
}

TEST(Refusals, NameTheFieldAndBothValues) {
  const int port = free_port();
  const Variable run("TORCHELASTIC_RUN_ID", "tuesday");
  const auto zero = tcp_control(launch_of(port, 0), 50s);
  EXPECT_THAT(
      refusal_of(launch_of(port, 1, 3)),
      AllOf(HasSubstr("number of ranks"), HasSubstr("'2' on rank 0"), HasSubstr("'3' on rank 1")));
  EXPECT_THAT(refusal_of(launch_of(port, 2)), HasSubstr("no rank 2 among 2 ranks"));
  {
    const Variable other("TORCHELASTIC_RUN_ID", "friday\n");
    EXPECT_THAT(refusal_of(launch_of(port, 1)),
                AllOf(HasSubstr("run differs"), HasSubstr("tuesday"), HasSubstr("friday\\n'")));
  }
  const Variable again("TORCHELASTIC_RUN_ID", "tuesday");
  Hello old = hello_of(launch_of(port, 1));
  old.version = "0.0.7";
  Stranger older(port);
  older.send(framed(Frame::hello, 1, to_text(old)));
  const std::string received = older.receive(1000);  // until it is hung up on
  EXPECT_EQ(received.substr(0, 8), header(Frame::refused, 0, 0).substr(0, 8));
  EXPECT_THAT(received, AllOf(HasSubstr("version"), HasSubstr("'0.0.7' on rank 1")));
  expect_meeting(*zero, port);
}

TEST(Refusals, OfAWrongSecretTellNothingElse) {
  const int port = free_port();
  std::unique_ptr<Control> zero;
  {
    const Variable secret("LONGSPAN_SECRET", "open sesame");
    zero = tcp_control(launch_of(port, 0), 50s);
  }
  for (const char* wrong : {"", "open sesam", "open sesamE", "open sesameopen sesame", "o"}) {
    const Variable secret("LONGSPAN_SECRET", wrong);
    EXPECT_THAT(refusal_of(launch_of(port, 1, 7)),
                AllOf(HasSubstr("LONGSPAN_SECRET differs"), Not(HasSubstr("sesam")),
                      Not(HasSubstr("number of ranks"))));
  }
  const Variable secret("LONGSPAN_SECRET", "open sesame");
  expect_meeting(*zero, port);
}

TEST(Refusals, OfARankWithASecretWhereThereIsNone) {
  const int port = free_port();
  const auto zero = tcp_control(launch_of(port, 0), 50s);
  {
    const Variable secret("LONGSPAN_SECRET", "open sesame");
    EXPECT_THAT(refusal_of(launch_of(port, 1)), HasSubstr("not set on rank 0, set on rank 1"));
  }
  expect_meeting(*zero, port);
}

/// Rank 1 by hand: seated, and then it sends `words`.
void expect_blame(const std::string& words) {
  const int port = free_port();
  const auto zero = tcp_control(launch_of(port, 0), 50s);
  Stranger one(port);
  one.send(hello_text(port, 1));
  ASSERT_EQ(one.receive(16), header(Frame::welcome, 1, 0));
  one.send(framed(Frame::seated, 0) + words);
  try {
    zero->gather("", "meet");
    ADD_FAILURE() << "went on";
  } catch (const RankError& error) {
    EXPECT_EQ(error.kind(), ErrorKind::rank_failure);
    EXPECT_EQ(error.rank(), 1);
  }
}

TEST(SeatedRanks, WhoSayWhatNoRankSaysAreNamed) {
  const std::string step = "meet";
  for (const std::string& words :
       {header(77, 0, 0), header(Frame::text, 0, (1u << 30) + 1), std::string(16, 'x'),
        framed(Frame::hello, 0), framed(Frame::welcome, 0), framed(Frame::died, 0),
        framed(Frame::text, 2, "g" + pack(step, step)), framed(Frame::text, 0xffffffff, "g"),
        framed(Frame::text, 0), framed(Frame::text, 0, "w" + pack(step, step)),
        framed(Frame::text, 0, "f" + pack(step, step, step, step))}) {
    SCOPED_TRACE(::testing::PrintToString(words));
    expect_blame(words);
  }
}

/// A program in the place of rank 0, and the error of rank 1 of two.
class Impostor {
 public:
  using Act = std::function<void(Stranger&, int connection)>;
  explicit Impostor(Act act) : listener_(some_listener()), port_(port_of(listener_.get())) {
    thread_ = std::thread([this, act = std::move(act)] {
      for (int connection = 0;; ++connection) {
        Fd guest(::accept(listener_.get(), nullptr, nullptr));
        if (!guest) return;
        guests_.emplace_back(std::move(guest));
        act(guests_.back(), connection);
      }
    });
  }
  ~Impostor() {
    ::shutdown(listener_.get(), SHUT_RDWR);
    thread_.join();
  }
  int port() const { return port_; }

 private:
  Fd listener_;
  int port_;
  std::vector<Stranger> guests_;
  std::thread thread_;
};

TEST(Guests, DoNotTakeAnybodyForRank0) {
  const std::vector<std::string> answers = {
      std::string(64, 'x'),
      header(Frame::welcome, 1, 1u << 30),
      header(99, 1, 0),
      framed(Frame::welcome, 0),    // for another rank
      framed(Frame::text, 1, "g"),  // before the welcome
      hello_text(1, 1),             // its own bytes, as from a socket that is connected to itself
      "HTTP/1.1 400 Bad Request\r\n\r\n",
  };
  for (const std::string& answer : answers) {
    SCOPED_TRACE(::testing::PrintToString(answer));
    Impostor impostor([&](Stranger& guest, int) { guest.send(answer); });
    try {
      tcp_control(launch_of(impostor.port(), 1), 300ms);
      ADD_FAILURE() << "met it";
    } catch (const RankError& error) {
      EXPECT_EQ(error.kind(), ErrorKind::timeout);
      EXPECT_EQ(error.rank(), 0);
    }
  }
}

TEST(Guests, OfAHubThatSaysWhatNoHubSays) {
  const std::vector<std::string> answers = {
      std::string(64, 'x'),
      header(Frame::text, 0, (1u << 30) + 1),
      header(99, 0, 0),
      framed(Frame::text, 2, "g"),
      framed(Frame::left, 7),
      framed(Frame::died, 0xffffffff),
      framed(Frame::hello, 0),
      framed(Frame::welcome, 1),
      framed(Frame::seated, 0),
      framed(Frame::refused, 0, "two have rank 1\x1b[2J"),
      framed(Frame::text, 0),
      framed(Frame::text, 0, "f3:abc"),
      framed(Frame::text, 0, "?"),
  };
  for (const std::string& answer : answers) {
    SCOPED_TRACE(::testing::PrintToString(answer));
    Impostor impostor(
        [&](Stranger& guest, int) { guest.send(framed(Frame::welcome, 1) + answer); });
    const auto control = tcp_control(launch_of(impostor.port(), 1), 20s);
    try {
      control->gather("", "meet");
      ADD_FAILURE() << "went on";
    } catch (const RankError& error) {
      EXPECT_EQ(error.kind(), ErrorKind::rank_failure);
      EXPECT_EQ(error.rank(), 0);
      EXPECT_THAT(error.what(), Not(HasSubstr("\x1b")));
    }
  }
}

TEST(Guests, ComeAgainWhereTheWelcomeIsLate) {
  Impostor impostor([](Stranger& guest, int connection) {
    if (connection > 0) guest.send(framed(Frame::welcome, 1) + framed(Frame::left, 0));
  });
  const auto control = tcp_control(launch_of(impostor.port(), 1), 50s);
  EXPECT_THROW(control->gather("", "meet"), RankError);  // rank 0 left
}

/// Bounds the time of a call that must end at its deadline of 1.5 s, at less than twice that.
template <class Call>
void expect_end_in_time(const Call& call) {
  const auto begin = std::chrono::steady_clock::now();
  call();
  const auto took = std::chrono::steady_clock::now() - begin;
  EXPECT_GE(took, 1400ms);
  EXPECT_LT(took, 2600ms);
}

TEST(Guests, OfWhoSaysNothingEndAtTheDeadline) {
  Impostor impostor([](Stranger&, int) {});
  expect_end_in_time([&] {
    try {
      tcp_control(launch_of(impostor.port(), 1), 1500ms);
      ADD_FAILURE() << "met";
    } catch (const RankError& error) {
      EXPECT_EQ(error.kind(), ErrorKind::timeout);
      EXPECT_EQ(error.rank(), 0);
      EXPECT_THAT(error.what(), AllOf(HasSubstr("within the deadline of 1.5 s"),
                                      HasSubstr("it takes connections, but does not answer")));
    }
  });
}

/// What a look-up waits for, and the callback that is asked to give up meanwhile.
TEST(Names, ThatNoServerAnswersForEndAtTheDeadline) {
  for (const int rank : {0, 1}) {
    const int before = silent_lookups;
    expect_end_in_time([&] {
      try {
        tcp_control(launch_of(free_port(), rank, 2, "head.silent"), 1500ms);
        ADD_FAILURE() << "met";
      } catch (const UsageError& error) {
        EXPECT_THAT(error.what(),
                    AllOf(HasSubstr("head.silent"), HasSubstr("no name server has answered"),
                          HasSubstr("MASTER_ADDR")));
      }
    });
    EXPECT_EQ(silent_lookups, before + 1) << "one question at a time";
  }
}

/// A rank that does not find rank 0 looks the name up again, without many queries to the name
/// server.
TEST(Names, AreLookedUpEverMoreSeldom) {
  const std::string nowhere(80, 'x');  // longer than a name may be: no server is asked
  for (const char* host : {nowhere.c_str(), "localhost"}) {
    const int before = all_lookups;
    EXPECT_THROW(tcp_control(launch_of(free_port(), 1, 2, host), 800ms), Error);
    EXPECT_GE(all_lookups - before, 2) << host;
    EXPECT_LE(all_lookups - before, 5) << host;
  }
}

TEST(Guests, AskTheirCallerWhetherToGoOn) {
  Impostor silent([](Stranger&, int) {});
  struct Case {
    const char* host;
    int port;
    int rank;
  };
  for (const Case& one :
       {Case{"localhost", silent.port(), 1}, Case{"localhost", free_port(), 1},
        Case{"head.silent", free_port(), 1}, Case{"head.silent", free_port(), 0}}) {
    SCOPED_TRACE(one.host);
    int asked = 0;
    try {
      tcp_control(launch_of(one.port, one.rank, 2, one.host), 60s, [&] { return ++asked == 3; });
      ADD_FAILURE() << "met";
    } catch (const RankError& error) {
      EXPECT_EQ(error.kind(), ErrorKind::rank_failure);
      EXPECT_EQ(error.rank(), one.rank);
      EXPECT_THAT(error.what(), HasSubstr("gave up: it was interrupted at 'meet rank 0'"));
    }
    EXPECT_EQ(asked, 3);
  }
  // And so does rank 0, which waits for the others.
  bool enough = false;
  const auto zero = tcp_control(launch_of(free_port(), 0), 60s, [&] { return enough; });
  enough = true;
  EXPECT_THROW(zero->gather("", "meet"), RankError);
}

TEST(Addresses, ThatNobodyHasAreSaidToBeSo) {
  const std::string nowhere(80, 'x');  // longer than a name may be: no server is asked
  for (const int rank : {0, 1}) {
    try {
      tcp_control(launch_of(free_port(), rank, 2, nowhere.c_str()), 200ms);
      ADD_FAILURE() << "met";
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), AllOf(HasSubstr(nowhere), HasSubstr("cannot be resolved"),
                                      HasSubstr("MASTER_ADDR")));
    }
  }
}

TEST(Addresses, AreListenedOnAlone) {
  const int port = free_port();
  const auto listeners = listen_at("127.0.0.2", port, kWait);
  EXPECT_EQ(listeners.size(), 1u);
  EXPECT_TRUE(Stranger(port, "\x7f\0\0\2").connected());
  EXPECT_FALSE(Stranger(port).connected());
}

TEST(Addresses, OfOtherMachinesMeanEveryAddressOfThisOne) {
  const int port = free_port();
  const auto listeners = listen_at("192.0.2.1", port, kWait);  // an address for documentation
  EXPECT_TRUE(Stranger(port).connected());
  EXPECT_TRUE(Stranger(port, "\x7f\0\0\2").connected());
}

TEST(Addresses, ThatAreTakenAreRefused) {
  const Fd taken = some_listener();
  try {
    listen_at("127.0.0.1", port_of(taken.get()), kWait);
    ADD_FAILURE() << "listens";
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), HasSubstr("LONGSPAN_PORT"));
  }
}

TEST(Hub, WithoutAThreadIsATypedError) {
  const int port = free_port();
  const Hello hello = hello_of(launch_of(port, 0));
  auto listeners = listen_at("localhost", port, kWait);
  const tests::NoThreads none;
  EXPECT_THROW(Hub(std::move(listeners), hello), BackendError);
}

}  // namespace
}  // namespace longspan::comm
