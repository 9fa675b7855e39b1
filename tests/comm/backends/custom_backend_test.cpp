// SPDX-License-Identifier: Apache-2.0
// A user's own backend: what the library makes of send and recv, what a transport does itself, and
// what happens when it fails.
#include "lockstep/comm/custom_backend.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <utility>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/conformance/conformance.h"
#include "lockstep/core/error.h"
#include "tests/support/says.h"

namespace lockstep::comm {
namespace {

using lockstep::test::says;
using ::testing::HasSubstr;

// Byte streams between threads of one process.
struct Streams {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::pair<int, int>, std::deque<std::byte>> bytes;  // from, to
};

class ThreadTransport : public Transport {
 public:
  explicit ThreadTransport(const TransportSite& site) : rank_(site.rank), streams_(find(site)) {}

  void send(int peer, std::span<const std::byte> data) override {
    EXPECT_FALSE(data.empty());
    const std::lock_guard lock(streams_->mutex);
    if (aborted_) throw std::runtime_error("the transport was aborted");
    auto& stream = streams_->bytes[{rank_, peer}];
    stream.insert(stream.end(), data.begin(), data.end());
    streams_->changed.notify_all();
  }
  void recv(int peer, std::span<std::byte> data) override {
    EXPECT_FALSE(data.empty());
    std::unique_lock lock(streams_->mutex);
    auto& stream = streams_->bytes[{peer, rank_}];
    streams_->changed.wait(lock, [&] { return aborted_ || stream.size() >= data.size(); });
    if (aborted_) throw std::runtime_error("the transport was aborted");
    std::copy_n(stream.begin(), data.size(), data.begin());
    stream.erase(stream.begin(), stream.begin() + static_cast<ptrdiff_t>(data.size()));
  }
  void abort() noexcept override {
    const std::lock_guard lock(streams_->mutex);
    aborted_ = true;
    streams_->changed.notify_all();
  }

 private:
  // Those of the same name and store share streams: as long as one of them lives.
  static std::shared_ptr<Streams> find(const TransportSite& site) {
    static std::mutex mutex;
    static std::map<std::pair<void*, std::string>, std::weak_ptr<Streams>> all;
    std::shared_ptr<Streams> mine;
    {
      const std::lock_guard lock(mutex);
      auto& known = all[{site.store.get(), site.name}];
      mine = known.lock();
      if (!mine) known = mine = std::make_shared<Streams>();
    }
    // Nobody may leave before all have come.
    site.store->set(site.name + "/" + std::to_string(site.rank), "here");
    for (int rank = 0; rank < site.size; ++rank)
      site.store->get(site.name + "/" + std::to_string(rank), Deadline(site.timeout));
    return mine;
  }

  int rank_;
  std::shared_ptr<Streams> streams_;
  bool aborted_ = false;
};

template <class T>
TransportFactory factory_of() {
  return [](const TransportSite& site) { return std::make_unique<T>(site); };
}

TEST(CustomBackend, SendAndRecvAlonePassTheConformanceChecks) {
  register_backend("plain", factory_of<ThreadTransport>());
  for (const int size : {2, 5}) {
    for (const ConformanceCheck& check : conformance_checks()) {
      SCOPED_TRACE(check.name);
      run_threads(size, check.run, {.backend = "plain", .check = true});
    }
  }
}

TEST(CustomBackend, ComparesWhatAStrategyRuns) {
  register_backend("compared", factory_of<ThreadTransport>());
  run_threads(2,
              [](const Group& group) {
                const at::Tensor data = at::ones({4});
                all_reduce(data, group).wait();
                EXPECT_EQ(data[3].item<float>(), 2);
                try {
                  all_reduce(at::ones({4 + group.rank()}), group).wait();
                  ADD_FAILURE() << "nothing was thrown";
                } catch (const MismatchError& error) {
                  EXPECT_THAT(error.what(), HasSubstr("all_reduce(float32[4], sum)"));
                  EXPECT_THAT(error.what(), HasSubstr("all_reduce(float32[5], sum)"));
                }
              },
              {.backend = "compared",
               .strategy = layout::CommStrategy::ring,
               .timeout = milliseconds{20'000},
               .check = true});
}

TEST(CustomBackend, HasTheSumsOfOtherBackends) {
  register_backend("summing", factory_of<ThreadTransport>());
  const auto sum = [](const std::string& backend) {
    at::Tensor result;
    run_threads(6,
                [&](const Group& group) {
                  at::Tensor data = at::arange(1001, at::kFloat).mul(0.1 + group.rank()).sin();
                  all_reduce(data, group).wait();
                  if (group.rank() == 0) result = data;
                },
                {.backend = backend});
    return result;
  };
  EXPECT_TRUE(at::equal(sum("summing"), sum("thread")));
}

// Takes float32 sums itself, by way of a peer that every rank asks.
class SummingTransport final : public ThreadTransport {
 public:
  using ThreadTransport::ThreadTransport;
  static inline std::atomic<int> runs_asked{0}, runs_done{0};

  explicit SummingTransport(const TransportSite& site)
      : ThreadTransport(site), rank_(site.rank), size_(site.size) {}
  bool runs(const fabric::Operation& operation) const override {
    ++runs_asked;
    return operation.kind == fabric::OpKind::all_reduce && operation.dtype == DType::float32 &&
           operation.reduce == ReduceOp::sum;
  }
  void run(const fabric::Operation& operation) override {
    ++runs_done;
    auto* mine = reinterpret_cast<float*>(operation.output.data());
    std::vector<float> other(operation.output.size() / sizeof(float));
    for (int peer = 1; peer < size_; ++peer) {
      if (rank_ == 0) {
        recv(peer, std::as_writable_bytes(std::span(other)));
        for (size_t i = 0; i < other.size(); ++i) mine[i] += other[i];
      } else if (rank_ == peer) {
        send(0, operation.output);
      }
    }
    for (int peer = 1; peer < size_; ++peer) {
      if (rank_ == 0) send(peer, operation.output);
      if (rank_ == peer) recv(0, operation.output);
    }
  }

 private:
  int rank_, size_;
};

TEST(CustomBackend, RunsTheCollectivesThatItDeclares) {
  register_backend("engine", factory_of<SummingTransport>());
  run_threads(3,
              [](const Group& group) {
                at::Tensor sum = at::full({5}, group.rank() + 1.0), largest = sum.clone();
                all_reduce(sum, group).wait();
                all_reduce(largest, group, {.op = ReduceOp::max}).wait();
                EXPECT_EQ(sum[4].item<float>(), 6);
                EXPECT_EQ(largest[4].item<float>(), 3);
              },
              {.backend = "engine"});
  EXPECT_EQ(SummingTransport::runs_done, 3);
  EXPECT_EQ(SummingTransport::runs_asked, 6);
}

TEST(CustomBackend, ALateRankIsNamedAndTheGroupIsBroken) {
  register_backend("late", factory_of<ThreadTransport>());
  const std::shared_ptr<std::atomic<int>> ended = std::make_shared<std::atomic<int>>(0);
  run_threads(3,
              [&](const Group& group) {
                if (group.rank() != 2) {
                  try {
                    all_reduce(at::ones({100}), group, {.timeout = milliseconds{300}}).wait();
                    ADD_FAILURE() << "went on without rank 2";
                  } catch (const TimeoutError& error) {
                    EXPECT_THAT(error.what(), HasSubstr("all_reduce"));
                    EXPECT_THAT(error.what(), HasSubstr("for rank"));
                    EXPECT_THAT(error.what(), HasSubstr("2"));
                  }
                  EXPECT_THROW(barrier(group).wait(), CommError);
                  ++*ended;
                  ended->notify_all();
                } else {
                  for (int seen = 0; seen < 2; seen = *ended) ended->wait(seen);
                }
              },
              {.backend = "late"});
}

class FailingTransport final : public ThreadTransport {
 public:
  using ThreadTransport::ThreadTransport;
  void send(int, std::span<const std::byte>) override { throw std::runtime_error("cable cut"); }
};

TEST(CustomBackend, WhatATransportThrowsIsTheErrorOfTheOperation) {
  register_backend("failing", factory_of<FailingTransport>());
  run_threads(2,
              [](const Group& group) {
                try {
                  all_reduce(at::ones({4}), group).wait();
                  ADD_FAILURE() << "nothing was thrown";
                } catch (const CommError& error) {
                  EXPECT_THAT(error.what(), HasSubstr("all_reduce"));
                  EXPECT_THAT(error.what(),
                              ::testing::AnyOf(HasSubstr("cable cut"), HasSubstr("was aborted")));
                }
                EXPECT_THROW(barrier(group).wait(), CommError);
              },
              {.backend = "failing"});
}

// Adds up one float itself; on rank 0 the first time goes wrong, before anything is sent.
class StumblingTransport final : public ThreadTransport {
 public:
  explicit StumblingTransport(const TransportSite& site)
      : ThreadTransport(site), rank_(site.rank) {}
  bool runs(const fabric::Operation& operation) const override {
    return operation.kind == fabric::OpKind::all_reduce;
  }
  void run(const fabric::Operation& operation) override {
    if (rank_ == 0 && !std::exchange(has_stumbled_, true)) throw std::runtime_error("stumbled");
    float theirs = 0;
    send(1 - rank_, operation.input);
    recv(1 - rank_, std::as_writable_bytes(std::span(&theirs, 1)));
    *reinterpret_cast<float*>(operation.output.data()) += theirs;
  }

 private:
  int rank_;
  bool has_stumbled_ = false;
};

TEST(CustomBackend, NothingRunsAfterACollectiveThatFailed) {
  register_backend("stumbling", factory_of<StumblingTransport>());
  run_threads(2,
              [](const Group& group) {
                const at::Tensor ones = at::ones({1}), tens = at::full({1}, 10.0F);
                Work first = all_reduce(ones, group), second = all_reduce(tens, group);
                // The one that is waited for first is not the one that failed.
                EXPECT_THROW(second.wait(), CommError) << tens.item<float>();
                EXPECT_THROW(first.wait(), CommError) << ones.item<float>();
              },
              {.backend = "stumbling"});
}

std::string failure_of_init(const std::string& backend) {
  try {
    run_threads(2, [](const Group&) {}, {.backend = backend});
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(CustomBackend, BadInput) {
  register_backend("taken", factory_of<ThreadTransport>());
  for (const char* name : {"taken", "shm", "auto", ""})
    EXPECT_THROW(register_backend(name, factory_of<ThreadTransport>()), ConfigError) << name;
  EXPECT_THROW(register_backend("empty", nullptr), ConfigError);
  EXPECT_FALSE(has_backend("empty"));

  register_backend("nothing", [](const TransportSite&) { return nullptr; });
  EXPECT_THAT(failure_of_init("nothing"), HasSubstr("backend 'nothing' made no transport"));
  register_backend("unplugged", [](const TransportSite&) -> std::unique_ptr<Transport> {
    throw std::runtime_error("no such device");
  });
  EXPECT_THAT(failure_of_init("unplugged"),
              says("backend 'unplugged' ... group 'world' ... no such device"));
}

}  // namespace
}  // namespace lockstep::comm
