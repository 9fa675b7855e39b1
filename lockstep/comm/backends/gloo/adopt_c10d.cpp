// SPDX-License-Identifier: Apache-2.0
#include "lockstep/comm/backends/gloo/adopt_c10d.h"

#include <ATen/ops/from_blob.h>

#include "lockstep/comm/adopt.h"
#include "lockstep/comm/backends/gloo/gloo.h"
#include "lockstep/comm/backends/gloo/process_group.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::comm {
namespace {

using gloo::Engine;

// The first line of what c10d throws; a stack follows.
std::string first_line(const std::exception& error) {
  const std::string words = error.what();
  return words.substr(0, words.find('\n'));
}

std::vector<std::string> gather_texts(Engine& engine, const std::string& text) {
  auto mine = detail::to_record(text);
  const auto size = static_cast<size_t>(engine.getSize());
  std::vector<std::byte> all(mine.size() * size);
  const auto tensor = [&](std::byte* data) {
    return at::from_blob(data, {static_cast<int64_t>(mine.size())}, at::kByte);
  };
  std::vector<at::Tensor> inputs{tensor(mine.data())};
  std::vector<std::vector<at::Tensor>> outputs(1);
  for (size_t rank = 0; rank < size; ++rank)
    outputs[0].push_back(tensor(all.data() + rank * mine.size()));
  engine.allgather(outputs, inputs)->wait();
  return detail::from_records(all);
}

Group adopt_engine(const c10::intrusive_ptr<Engine>& engine, InitOptions options) {
  const std::string name = engine->getBackendName();
  if (name == "nccl")
    throw ConfigError(
        "[adopt] the process group is of nccl, must take CPU tensors; adopt its ncclComm_t");
  const auto gather = [&](const std::string& text) {
    try {
      return gather_texts(*engine, text);
    } catch (const std::exception& error) {
      throw CommError(format("[adopt] rank {} of a process group of {}: {}", engine->getRank(),
                             name, first_line(error)));
    }
  };
  const std::string backend = name == "gloo" ? name : "c10d:" + name;
  // Others, of some of its ranks or of all again, the engine cannot make.
  const auto create = [engine, backend](detail::Membership membership) {
    return membership.name == "world"
               ? gloo::make_process_group(std::move(membership), backend, engine)
               : gloo::create(std::move(membership));
  };
  return detail::adopt_world(engine->getRank(), engine->getSize(), gather,
                             {backend, gloo::is_available, create}, std::move(options));
}

// The engine that takes tensors of the CPU. A template, because in libtorch 1.13 a ProcessGroup is
// an engine, and from 2.0 on it has one for each kind of device.
template <class Given>
c10::intrusive_ptr<Engine> engine_of(const c10::intrusive_ptr<Given>& group) {
  if (!group) throw ConfigError("[adopt] the process group is null");
  if constexpr (std::is_base_of_v<Engine, Given>) {
    return group;
  } else if constexpr (requires { group->getBackend(c10::DeviceType::CPU); }) {
    try {
      return group->getBackend(c10::DeviceType::CPU);
    } catch (const std::exception& error) {
      throw ConfigError("[adopt] the process group takes no CPU tensors: " + first_line(error));
    }
  } else {
    throw ConfigError("[adopt] a c10d::Backend needs libtorch 2; this is 1.13");
  }
}

}  // namespace

Group detail::adopt(c10::intrusive_ptr<c10d::ProcessGroup> group, InitOptions options) {
  return adopt_engine(engine_of(group), std::move(options));
}

Group detail::adopt(c10::intrusive_ptr<c10d::Backend> group, InitOptions options) {
  return adopt_engine(engine_of(group), std::move(options));
}

}  // namespace lockstep::comm
