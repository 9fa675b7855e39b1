// SPDX-License-Identifier: Apache-2.0
// Programs that reach past torch's operators into a model that is sharded: they die as before, and
// say of what. Others die without a word of ours, by the handler that they have.
#include <gtest/gtest.h>
#include <torch/serialize.h>
#include <unistd.h>

#include <csetjmp>
#include <csignal>
#include <cstdlib>
#include <sstream>
#include <string>

#include "lockstep/comm/collectives.h"
#include "lockstep/memory/arena.h"
#include "tests/parallel/shard/pair.h"

namespace lockstep::test {
namespace {

// What the kernel does with the signal, or a sanitizer, which has a handler of its own.
bool died_of_a_fault(int status) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  return status != 0;
#else
  return WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV;
#endif
}

template <class Body>
void on_a_sharded_net(const Body& body) {
  on_ranks([&](const comm::Group& group) {
    const auto net = std::make_shared<Net>();
    auto sharded = parallel::fully_shard(
        *net, group, {.units = parallel::ByType{{"Linear"}}, .min_num_params = 1});
    if (group.rank() == 1) body(net, sharded);
    comm::barrier(group).wait();
  });
}

double first_value(const at::Tensor& tensor) {
  return *static_cast<const volatile float*>(tensor.data_ptr());
}

class FaultReport : public testing::Test {
 protected:
  void SetUp() override { testing::FLAGS_gtest_death_test_style = "threadsafe"; }
};
using FaultReportDeathTest = FaultReport;

TEST_F(FaultReportDeathTest, DataPtrOfADroppedParameter) {
  const auto read = [] {
    on_a_sharded_net([](const auto& net, auto&) { first_value(net->b->weight); });
  };
  EXPECT_EXIT(read(), died_of_a_fault, "rank 1: .*parameter b.weight of unit b, .*summon\\(\\)");
  const auto write = [] {
    on_a_sharded_net([](const auto& net, auto&) {
      float* const bias = static_cast<float*>(net->a->bias.data_ptr());
      for (int i = 0; i < 8; ++i) bias[i] = 0;
    });
  };
  EXPECT_EXIT(write(), died_of_a_fault, "parameter a.bias of unit a");
}

TEST_F(FaultReportDeathTest, TorchSave) {
  const auto save = [] {
    on_a_sharded_net([](const auto& net, auto&) {
      std::ostringstream file;
      torch::save(net, file);
    });
  };
  EXPECT_EXIT(save(), died_of_a_fault, "parameter scale of unit model, .*lockstep::checkpoint");
}

// ---- handlers of the program ----

sigjmp_buf after_fault;
void* faulted_at = nullptr;

void earlier_handler(int, siginfo_t* info, void*) {
  faulted_at = info->si_addr;
  siglongjmp(after_fault, 1);
}

// Whether the earlier handler was called, with the address.
template <class Use>
bool faults(const Use& use, const void* address) {
  faulted_at = nullptr;
  if (sigsetjmp(after_fault, 1) == 0) use();
  return faulted_at == address && address != nullptr;
}

void fault_under_a_handler() {
  struct sigaction action {};
  action.sa_sigaction = &earlier_handler;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGSEGV, &action, nullptr);
  bool called = true;
  on_a_sharded_net([&](const auto& net, parallel::ShardedModel& sharded) {
    const memory::AddressRange other(4096, memory::AddressRange::Access::none);
    called = called &&
             faults([&] { *reinterpret_cast<volatile char*>(other.data()) = 1; }, other.data());
    const auto touch = [&](const at::Tensor& tensor) {
      called = called && faults([&] { first_value(tensor); }, tensor.data_ptr());
    };
    std::fprintf(stderr, "own:\n");
    touch(net->b->bias);
    at::Tensor weight = net->a->weight;
    sharded = parallel::ShardedModel(nullptr);
    touch(weight);  // its model has gone, the addresses have not
  });
  std::_Exit(called ? 0 : 1);
}

TEST_F(FaultReportDeathTest, EarlierHandlersAreCalledAndOtherFaultsPassOn) {
  EXPECT_EXIT(fault_under_a_handler(), testing::ExitedWithCode(0),
              "^own:\n[^\n]*parameter b.bias of unit b[^\n]*\n[^\n]*parameter a.weight of unit "
              "a[^\n]*\n$");
}

TEST_F(FaultReportDeathTest, SignalsThatWereSentEndTheProcess) {
  const auto send = [] { on_a_sharded_net([](const auto&, auto&) { raise(SIGSEGV); }); };
  EXPECT_EXIT(send(), died_of_a_fault, "^$");
}

TEST_F(FaultReportDeathTest, TheVariableTurnsItOff) {
  const auto read = [] {
    setenv("LOCKSTEP_INTERCEPT", "operators", 1);
    on_a_sharded_net([](const auto& net, auto&) { first_value(net->b->weight); });
  };
  EXPECT_EXIT(read(), died_of_a_fault, "^$");
}

}  // namespace
}  // namespace lockstep::test
