// SPDX-License-Identifier: Apache-2.0
// Programs that have a part in what Lockstep intercepts in torch: engines and hooks of their own,
// Python, another library with our dispatch key. Each works, or is refused at the first call with
// the reason. parallel/intercept/transforms_test.cpp has what torch itself does to functions.
#include <ATen/core/dispatch/Dispatcher.h>
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/library.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <typeinfo>

#include "lockstep/core/error.h"
#include "lockstep/parallel/data/ddp.h"
#include "lockstep/parallel/intercept/deferred.h"
#include "lockstep/parallel/recompute/recompute.h"
#include "tests/parallel/shard/pair.h"
#include "tests/support/sampling.h"
#include "tests/support/says.h"

namespace lockstep::test {
namespace {

using torch::autograd::Engine;
using torch::autograd::SavedVariableHooks;

constexpr auto kKey = c10::DispatchKey::DeferredInit;

bool has_fallback() { return c10::Dispatcher::singleton().hasBackendFallbackForDispatchKey(kKey); }
bool has_torchs_engine() { return typeid(Engine::get_default_engine()) == typeid(Engine); }

void defer() {
  const auto deferred = parallel::deferred([] { return torch::nn::Linear(200, 200); });
  require(deferred.model->weight.is_meta(), "a deferred weight has memory");
}

void shard_on_two_ranks() {
  on_ranks([](const comm::Group& group) {
    Pair pair(group);
    pair.step([](Net& net) { return loss_of(net.forward(input_of(0))); });
  });
}

// How often the function is called: twice where it is recomputed.
int calls_of_recompute() {
  const at::Tensor x = at::ones({3}).set_requires_grad(true);
  int calls = 0;
  const at::Tensor y = parallel::recompute(
      [&calls](const at::Tensor& input) {
        ++calls;
        return input.exp().sin();
      },
      x);
  y.sum().backward();
  require_same(x.grad(), (at::ones({3}).exp().cos() * at::ones({3}).exp()), "the gradient");
  return calls;
}

template <class Call>
void require_refused_with(const Call& call, const std::string& part) {
  try {
    call();
  } catch (const ConfigError& error) {
    require(test::missing_fact(error.what(), part).empty(),
            std::string("the message is: ") + error.what());
    return;
  }
  throw std::runtime_error("nothing was refused: " + part);
}

// In a process of its own, where nothing is installed.
[[noreturn]] void run_alone(void (*body)()) {
  try {
    body();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    std::_Exit(1);
  }
  std::_Exit(0);
}
void expect_alone(void (*body)()) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(run_alone(body), testing::ExitedWithCode(0), "");
}

TEST(Interception, NothingIsInstalledBeforeItIsNeeded) {
  expect_alone([] {
    on_ranks([](const comm::Group& group) {
      torch::nn::Linear model(4, 4);
      const auto replicated = parallel::ddp(model, group);
      model->forward(at::ones({2, 4})).sum().backward();
    });
    const auto alone = std::make_shared<Net>();
    const auto sharded = parallel::fully_shard(*alone, comm::Group());  // a group of one: plain
    alone->forward(input_of(0)).sum().backward();
    require(!has_fallback(), "plain training has installed the fallback");
    require(has_torchs_engine(), "plain training has installed an engine");
    defer();
    require(has_fallback() && has_torchs_engine(), "deferred() needs the fallback alone");
    require(calls_of_recompute() == 2, "recompute does not recompute");
    require(!has_torchs_engine(), "recompute has no engine");
  });
}

// ---- another library with the key ----

torch::Library other_library(const char* name_space) {
  return torch::Library(torch::Library::IMPL, name_space, kKey, "other_library.cpp", 7);
}

TEST(Interception, AnotherLibraryHasTheKey) {
  expect_alone([] {
    {
      auto other = other_library("aten");
      other.impl("mm", torch::CppFunction::makeFallthrough());
      require_refused_with(defer, "a kernel of aten::mm");
    }
    {
      auto other = other_library("_");
      other.fallback(torch::CppFunction::makeFallthrough());
      require_refused_with(defer, "other_library.cpp:7");
      require_refused_with(shard_on_two_ranks, "DeferredInit ... another library");
      // The thread is as it was.
      require(at::ones({2}).sum().item<float>() == 2, "operators do not work any more");
      require(calls_of_recompute() == 2, "recompute needs no key");
    }
    defer();  // it is free again
    shard_on_two_ranks();
    // The other way round torch tells the other one, and ours stays.
    auto late = other_library("_");
    try {
      late.fallback(torch::CppFunction::makeFallthrough());
      throw std::runtime_error("torch takes a second fallback");
    } catch (const c10::Error& error) {
      require(std::string(error.what()).find("Lockstep") != std::string::npos, error.what());
    }
    shard_on_two_ranks();
  });
}

// ---- the switch ----

TEST(Interception, IsOffWhereTheUserSaysSo) {
  expect_alone([] {
    setenv("LOCKSTEP_INTERCEPT", "saved_tensors,everything", 1);
    require_refused_with(defer, "all, none ... operators, saved_tensors");
    setenv("LOCKSTEP_INTERCEPT", "saved_tensors", 1);
    require_refused_with(defer, "LOCKSTEP_INTERCEPT is 'saved_tensors'");
    require_refused_with(shard_on_two_ranks, "[fully_shard] LOCKSTEP_INTERCEPT");
    require(!has_fallback(), "the fallback is installed");
    require(calls_of_recompute() == 2, "recompute is off");
    setenv("LOCKSTEP_INTERCEPT", "all", 1);
    defer();
  });
  expect_alone([] {
    setenv("LOCKSTEP_INTERCEPT", "operators", 1);
    require(calls_of_recompute() == 1, "recompute is on");  // and says in the log what is lost
    require(has_torchs_engine(), "the engine is installed");
    shard_on_two_ranks();
  });
}

// ---- engines and hooks of the program ----

// Newer versions ask for more.
template <class Base>
struct Whole : Base {};
template <class Base>
requires requires(const Base& hooks) { hooks.retrieve_unpack_hook_data(); }
struct Whole<Base> : Base {
  decltype(std::declval<const Base&>().retrieve_unpack_hook_data()) retrieve_unpack_hook_data()
      const override {
    throw Error("not traced");
  }
};

std::atomic<int> executed = 0, packed = 0, unpacked = 0;

struct CountingHooks : Whole<SavedVariableHooks> {
  void call_pack_hook(const at::Tensor& tensor) override {
    ++packed;
    kept = tensor.detach();
  }
  at::Tensor call_unpack_hook() override {
    ++unpacked;
    return kept;
  }
  at::Tensor kept;
};

struct CountingEngine : Engine {
  torch::autograd::variable_list execute(const torch::autograd::edge_list& roots,
                                         const torch::autograd::variable_list& inputs,
                                         bool keep_graph, bool create_graph, bool accumulate_grad,
                                         const torch::autograd::edge_list& outputs) override {
    ++executed;
    return Engine::execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  }
  std::unique_ptr<SavedVariableHooks> get_default_saved_variable_hooks() override {
    return std::make_unique<CountingHooks>();
  }
};

void set_counting_engine() {
  torch::autograd::set_default_engine_stub([]() -> Engine& {
    static auto* const engine = new CountingEngine;
    return *engine;
  });
}

// Theirs does the backward and sees what is saved outside recomputed functions; ours recomputes.
void require_both_engines() {
  executed = packed = unpacked = 0;
  require(calls_of_recompute() == 2, "recompute does not recompute");
  require(executed == 1, "the program's engine did not run the backward");
  require(packed == 0, "a recomputed function's tensors were saved");
  const at::Tensor x = at::ones({3}).set_requires_grad(true);
  x.exp().sum().backward();
  require(executed == 2 && packed == 1 && unpacked == 1, "the program's hooks are not called");
  shard_on_two_ranks();
}

TEST(Interception, WorksWithAnAutogradEngineOfTheProgram) {
  expect_alone([] {
    set_counting_engine();  // it was there first
    require_both_engines();
    set_counting_engine();  // it takes the place of ours
    require_both_engines();
  });
}

TEST(Interception, AnomaliesAreStillFound) {
  const torch::autograd::DetectAnomalyGuard guard;
  const at::Tensor x = at::zeros({2}).set_requires_grad(true);
  const at::Tensor y =
      parallel::recompute([](const at::Tensor& input) { return input.sqrt() * 0; }, x);
  EXPECT_THAT([&] { y.sum().backward(); },
              testing::ThrowsMessage<std::exception>(testing::HasSubstr("nan")));
}

// ---- Python in the process ----

#ifdef LOCKSTEP_LIBPYTHON

// An embedded interpreter, without Python's headers.
class Python {
 public:
  Python() : library_(dlopen(LOCKSTEP_LIBPYTHON, RTLD_NOW | RTLD_GLOBAL)) {
    require(library_ != nullptr, "no " LOCKSTEP_LIBPYTHON);
    call<void (*)(int)>("Py_InitializeEx")(0);
    run("import torch");
    // As a program that embeds Python must: autograd's threads take the lock themselves.
    call<void* (*)()>("PyEval_SaveThread")();
  }
  void run_locked(const char* code) {
    locked([&] { run(code); });
  }
  template <class Body>
  void locked(const Body& body) {
    const int state = call<int (*)()>("PyGILState_Ensure")();
    body();
    call<void (*)(int)>("PyGILState_Release")(state);
  }

 private:
  template <class Function>
  Function call(const char* name) const {
    auto* const found = reinterpret_cast<Function>(dlsym(library_, name));
    require(found != nullptr, name);
    return found;
  }
  void run(const char* code) const {
    require(call<int (*)(const char*)>("PyRun_SimpleString")(code) == 0, code);
  }

  void* library_;
};

// Hooks, functions and checkpoints of Python need Python's engine.
constexpr const char* kPythonUsesAutograd = R"(
import torch
from torch.utils.checkpoint import checkpoint
packed = []
with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(1) or t, lambda t: t):
    x = torch.ones(3, requires_grad=True)
    y = x.exp()
y.sum().backward()
assert packed and torch.equal(x.grad, torch.ones(3).exp())

class Double(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return 2 * x
    @staticmethod
    def backward(context, gradient):
        return 2 * gradient

z = torch.ones(3, requires_grad=True)
checkpoint(lambda t: Double.apply(t).exp(), z).sum().backward()
assert torch.equal(z.grad, 2 * torch.full((3,), 2.0).exp())
)";

void require_python_and_lockstep(Python& python) {
  require(calls_of_recompute() == 2, "recompute does not recompute");
  shard_on_two_ranks();
  defer();
  python.run_locked(kPythonUsesAutograd);
  require(calls_of_recompute() == 2, "recompute does not recompute any more");
  // Python's engine refuses who holds its lock, in front of which ours must not hide it.
  python.locked([] {
    try {
      calls_of_recompute();
    } catch (const std::exception& error) {
      require(std::string(error.what()).find("GIL") != std::string::npos, error.what());
      return;
    }
    throw std::runtime_error("Python's engine is not asked");
  });
}

TEST(Interception, PythonInTheProcess) {
  expect_alone([] {
    Python python;
    require(!has_torchs_engine(), "Python has no engine");
    require_python_and_lockstep(python);
  });
  if (!tests_all()) return;
  expect_alone([] {  // that comes later
    require(calls_of_recompute() == 2, "recompute does not recompute");
    Python python;
    require_python_and_lockstep(python);
  });
}

#endif  // LOCKSTEP_LIBPYTHON

}  // namespace
}  // namespace lockstep::test
