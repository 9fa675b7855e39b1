// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/pipeline/tied.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <functional>
#include <map>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/control/rank_texts.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/philox.h"

namespace lockstep::parallel::detail {
namespace {

uint64_t hash_of(const std::string& name) { return random_key(0, "name", name).tensor; }

struct Places {
  std::vector<int> stages = {};
  bool tied = false;
};

// Every rank's parameters with the stages that have them, in one exchange: names travel as hashes.
std::map<uint64_t, Places> places_of_names(const std::vector<Stage*>& stages,
                                           const std::function<bool(const std::string&)>& is_tied,
                                           const schedule::Pipeline& layout,
                                           const comm::Group& group) {
  std::vector<int64_t> mine;  // hash, stage, whether it is tied
  for (size_t chunk = 0; chunk < stages.size(); ++chunk) {
    for (const auto& item : stages[chunk]->module().named_parameters()) {
      mine.push_back(static_cast<int64_t>(hash_of(item.key())));
      mine.push_back(layout.stage(group.rank(), static_cast<int>(chunk)));
      mine.push_back(is_tied(item.key()) ? 1 : 0);
    }
  }
  const auto ranks = static_cast<size_t>(group.size());
  const at::Tensor sizes = at::empty({group.size()}, at::kLong);
  comm::all_gather(sizes, at::full({1}, static_cast<int64_t>(mine.size()), at::kLong), group)
      .wait();
  const std::vector<int64_t> counts(sizes.data_ptr<int64_t>(), sizes.data_ptr<int64_t>() + ranks);
  const at::Tensor all = at::empty({sizes.sum().item<int64_t>()}, at::kLong);
  comm::all_gather(all, at::tensor(mine, at::kLong), group, {.counts = counts}).wait();
  std::map<uint64_t, Places> found;
  const int64_t* word = all.data_ptr<int64_t>();
  for (int64_t i = 0; i < all.numel(); i += 3) {
    Places& places = found[static_cast<uint64_t>(word[i])];
    places.stages.push_back(static_cast<int>(word[i + 1]));
    places.tied = word[i + 2] != 0;
  }
  for (auto& [name, places] : found) std::sort(places.stages.begin(), places.stages.end());
  return found;
}

// Some stage has each of the modules by a layer that is not tied. Collective.
void require_owners(const std::vector<std::string>& modules, const std::vector<Stage*>& stages,
                    const comm::Group& group) {
  if (modules.empty()) return;
  const at::Tensor owners = at::zeros({static_cast<int64_t>(modules.size())}, at::kLong);
  for (size_t i = 0; i < modules.size(); ++i) {
    for (const Stage* const stage : stages) {
      if (find_layer(stage->module(), modules[i]) && !stage->untied().contains(modules[i]))
        owners[static_cast<int64_t>(i)] += 1;
    }
  }
  comm::all_reduce(owners, group, {.tag = "owners of tied layers"}).wait();
  for (size_t i = 0; i < modules.size(); ++i) {
    // Layers of the program's own may all say that they are tied.
    if (std::ranges::count(modules, modules[i]) > 1) continue;
    if (owners[static_cast<int64_t>(i)].item<int64_t>() > 0) continue;
    std::string mine;
    for (const Stage* const stage : stages) {
      for (const std::string& name : layer_names(stage->module(), stage->untied()))
        mine += mine.empty() ? name : "\n" + name;
    }
    std::vector<std::string> names;
    for (const std::string& text : comm::gather_texts(mine, group)) {
      for (size_t begin = 0; begin < text.size();) {
        const size_t end = std::min(text.find('\n', begin), text.size());
        names.push_back(text.substr(begin, end - begin));
        begin = end + 1;
      }
    }
    refuse_tied(modules[i], names);
  }
}

}  // namespace

TiedParameters::TiedParameters(const std::vector<std::string>& names,
                               const std::vector<std::string>& modules, std::vector<Stage*> stages,
                               const schedule::Pipeline& layout, const comm::Group& group,
                               milliseconds timeout)
    : stages_(std::move(stages)), group_(group), timeout_(timeout) {
  require_owners(modules, stages_, group_);
  const auto is_tied = [&](const std::string& name) {
    return std::ranges::find(names, name) != names.end() ||
           std::ranges::any_of(
               modules, [&](const std::string& path) { return name.starts_with(path + "."); });
  };
  const auto found = places_of_names(stages_, is_tied, layout, group_);
  for (const std::string& name : names) {
    if (!found.contains(hash_of(name)))
      throw ConfigError(format("[pipeline] tied has '{}', which no stage has", name));
  }
  std::map<uint64_t, std::string> mine;
  for (const Stage* stage : stages_) {
    for (const auto& item : stage->module().named_parameters())
      mine[hash_of(item.key())] = item.key();
  }
  for (const auto& [hash, places] : found) {
    if (places.stages.size() == 1) continue;
    const std::string name = mine.contains(hash) ? mine[hash] : "";
    if (!places.tied) {
      throw ConfigError(format(
          "[pipeline] {} is in stages {}; build the second layer with tied_layer(), or name "
          "the parameter in tied, if it is one parameter, or give the layers other names",
          name.empty() ? "a parameter" : format("parameter '{}'", name), join(places.stages)));
    }
    for (size_t i = 1; i < places.stages.size(); ++i) {
      copies_.push_back({.name = name,
                         .owner = layout.place(places.stages[0]),
                         .copy = layout.place(places.stages[i])});
    }
  }
  // Shards must be cut alike. All ranks hear of it if two are not.
  const auto rows = static_cast<int64_t>(copies_.size());
  const at::Tensor numel = at::zeros({rows, 2}, at::kLong), kinds = at::zeros({rows, 2}, at::kLong);
  for (size_t i = 0; i < copies_.size(); ++i) {
    const Copy& copy = copies_[i];
    const auto note = [&](const schedule::Place& place, int64_t column) {
      if (place.rank != group_.rank()) return;
      const at::Tensor tensor = find(place.chunk, copy.name);
      if (!tensor.defined()) return;
      const auto row = static_cast<int64_t>(i);
      numel[row][column] = tensor.numel();
      kinds[row][column] = static_cast<int64_t>(
          random_key(0, "kind", format("{} {}", join(tensor.sizes()), tensor.toString())).tensor);
    };
    note(copy.owner, 0);
    note(copy.copy, 1);
  }
  if (copies_.empty()) return;
  comm::all_reduce(numel, group_, {.tag = "sizes of tied parameters"}).wait();
  comm::all_reduce(kinds, group_, {.tag = "shapes of tied parameters"}).wait();
  for (size_t i = 0; i < copies_.size(); ++i) {
    const auto sizes = numel[static_cast<int64_t>(i)];
    const auto same = [&](const at::Tensor& pair) {
      return pair[0].item<int64_t>() == pair[1].item<int64_t>();
    };
    if (same(sizes) && same(kinds[static_cast<int64_t>(i)])) continue;
    throw ConfigError(
        format("[pipeline] tied parameter '{}' has {} elements in its first stage and {} in "
               "another; number, shape and type must be the same, and where stages are sharded it "
               "must be a unit of its own",
               copies_[i].name, sizes[0].item<int64_t>(), sizes[1].item<int64_t>()));
  }
}

at::Tensor TiedParameters::find(int chunk, const std::string& name) const {
  Stage& stage = *stages_[static_cast<size_t>(chunk)];
  if (!stage.sharded()) return stage.module().named_parameters()[name];
  for (const auto& parameter : stage.named_parameters()) {
    if (parameter.name == name) return parameter.tensor;
  }
  // Frozen: not among those for an optimizer.
  for (const NamedShard& part : stage.sharded()->sharded_state_dict()) {
    if (part.placement.name == name && !part.placement.is_empty()) return part.tensor;
  }
  return {};  // a rank that has no rows of it
}

bool TiedParameters::is_copy(int chunk, const std::string& name) const {
  return std::any_of(copies_.begin(), copies_.end(), [&](const Copy& copy) {
    return copy.copy.rank == group_.rank() && copy.copy.chunk == chunk && copy.name == name;
  });
}

void TiedParameters::copy_values() {
  const at::NoGradGuard no_grad;
  std::vector<comm::Work> sends;
  for (const Copy& copy : copies_) {
    const bool owns = copy.owner.rank == group_.rank(), copies = copy.copy.rank == group_.rank();
    at::Tensor value;
    if (owns) value = find(copy.owner.chunk, copy.name);
    if (owns && !copies && value.defined())
      sends.push_back(
          comm::send(value.detach().clone(), copy.copy.rank, group_, {.timeout = timeout_}));
    if (!copies) continue;
    if (auto& sharded = stages_[static_cast<size_t>(copy.copy.chunk)]->sharded())
      sharded->begin_update();
    const at::Tensor target = find(copy.copy.chunk, copy.name);
    if (!target.defined()) continue;
    if (!owns) {
      value = at::empty(target.sizes(), target.options());
      comm::recv(value, copy.owner.rank, group_, {.timeout = timeout_}).wait();
    }
    target.copy_(value);
  }
  for (comm::Work& send : sends) send.wait();
}

void TiedParameters::return_gradients() {
  const at::NoGradGuard no_grad;
  std::vector<comm::Work> sends;
  for (const Copy& copy : copies_) {
    const bool owns = copy.owner.rank == group_.rank(), copies = copy.copy.rank == group_.rank();
    at::Tensor gradient;
    if (copies) {
      const at::Tensor source = find(copy.copy.chunk, copy.name);
      if (!source.defined() || !source.requires_grad()) continue;
      at::Tensor& place = source.mutable_grad();
      gradient = place.defined() ? place.detach() : at::zeros_like(source);
      if (!owns)
        sends.push_back(
            comm::send(gradient.clone(), copy.owner.rank, group_, {.timeout = timeout_}));
      place.reset();
    }
    if (!owns) continue;
    const at::Tensor target = find(copy.owner.chunk, copy.name);
    if (!target.defined() || !target.requires_grad()) continue;
    at::Tensor& sum = target.mutable_grad();
    if (!copies) {
      gradient = at::empty(target.sizes(), target.options());
      comm::recv(gradient, copy.copy.rank, group_, {.timeout = timeout_}).wait();
    }
    if (sum.defined()) {
      sum.add_(gradient);
    } else {
      sum = gradient.clone();
    }
  }
  for (comm::Work& send : sends) send.wait();
}

}  // namespace lockstep::parallel::detail
