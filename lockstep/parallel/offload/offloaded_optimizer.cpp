// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <map>
#include <unordered_map>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/log.h"
#include "lockstep/core/size_text.h"
#include "lockstep/memory/later_event.h"
#include "lockstep/optim/gradient_passes.h"
#include "lockstep/optim/parameters/named_state.h"
#include "lockstep/parallel/offload/decide_again.h"
#include "lockstep/parallel/offload/offload.h"
#include "lockstep/parallel/offload/offloaded_rule.h"
#include "lockstep/parallel/shard/sharded_model_state.h"
#include "lockstep/parallel/tiers/offloaded_state.h"
#include "lockstep/parallel/tiers/update_ring.h"

namespace lockstep::parallel {

using detail::Flat;
using detail::OffloadedState;
using detail::OffloadTiers;
using detail::UpdateInput;
using detail::UpdateRing;
using layout::Tier;

namespace {

constexpr const char* kState = "optimizer state";

// State is about to be read or written together with its parameters: a coded parameter's are its
// codes, into which what others wrote goes first; others' are their values.
void expose(const Flat& flat, bool to_write) {
  if (flat.shard.is_packed()) return flat.shard.open(to_write);
  flat.shard.settle();
}

// What LZ4 made of each kind in the first step. By the driver, when its updates are over.
void say_ratios(const detail::ShardEngine& engine) {
  const OffloadTiers& tiers = *engine.tiers();
  const layout::StateCodecs& codecs = tiers.options.codec;
  const auto is_lossless = [](codec::Codec codec) { return codec == codec::Codec::lossless; };
  const auto say = [&](bool lossless, const char* what, const OffloadStats::Kept& kept) {
    if (!lossless || kept.bytes == 0 || kept.plain == 0) return;
    const int64_t moved = what == kState ? tiers.kept.moved_to_host.load() : 0;
    log::info(format(
        "[offload] {} outside the device {} kept in {:.3f} of {} bytes: the host budget of {} is "
        "one of {}{}",
        what, what == kState ? "is" : "are", kept.ratio(), what == kState ? "its" : "their",
        size_text(tiers.options.host_budget),
        size_text(layout::effective_budget(tiers.options.host_budget, kept.ratio())),
        moved > 0 ? format("; {} that were planned for the disk are on the host", size_text(moved))
                  : ""));
  };
  say(is_lossless(codecs.params), "parameters", detail::kept_params(engine));
  say(is_lossless(codecs.grads), "gradients", detail::kept_grads(engine));
  say(is_lossless(codecs.exp_avg) || is_lossless(codecs.exp_avg_sq), kState,
      {.bytes = tiers.kept.bytes, .plain = tiers.kept.plain});
}

}  // namespace

struct OffloadedOptimizer::State {
  // A part of the state as optimizers have it, as long as it is referenced.
  struct Shown {
    std::weak_ptr<at::Tensor> memory = {};
    bool fresh = false;  // refreshed: what is written into it from then on may be adopted
  };
  // A tensor that is updated.
  struct Tensor {
    optim::NamedParameter parameter;
    size_t group;
    std::unique_ptr<OffloadedState> state;
    Flat* flat = nullptr;
    int64_t begin = 0;  // of its elements in the flat's shard
    at::Tensor step = at::zeros({}, at::kLong);
    bool updated = false;  // in this step already
    // Shown to others, who keep them: 12 bytes of an element are too many to hold for the next
    // checkpoint.
    std::vector<Shown> moments = {};
    Shown master = {};

    bool has_master() const { return parameter.tensor.element_size() == 2; }
    at::ScalarType state_type() const {
      return parameter.tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    }
    void forget() {
      for (Shown& moment : moments) moment.fresh = false;
      master.fresh = false;
    }
  };
  struct OffloadedFlat {
    Flat* flat;
    std::vector<size_t> tensors;  // in `tensors`
  };
  struct Model final : detail::OffloadedUpdater {
    Model(State& given_state, const ShardedModel& given, std::shared_ptr<OffloadTiers> given_tiers)
        : state(given_state), model(given), tiers(std::move(given_tiers)) {}
    ~Model() override {
      tiers->wait();  // outstanding updates read and write memory that goes now
    }
    void take_gradients(size_t flat) override { state.update(*this, flat); }
    void before_foreign_writes() override { state.hold_values(*this); }

    State& state;
    ShardedModel model;
    std::shared_ptr<OffloadTiers> tiers;
    std::shared_ptr<UpdateRing> ring;
    std::map<size_t, OffloadedFlat> flats = {};
    memory::Event last = {};  // everything that was queued
    bool measured = false;    // what LZ4 makes of the state
    bool has_room = false;    // that LZ4 makes of parameters and gradients, for state
  };

  State(std::vector<ShardedModel> given, std::vector<optim::ParameterGroup> groups, Rule rule);
  void add(const ShardedModel& model);
  void update(Model& model, size_t flat);
  UpdateInput input_for(Tensor& tensor, const Flat& flat, bool own);
  void hold_values(Model& model);
  std::vector<optim::NamedTensor> shown(Tensor& tensor);
  // memory(part, name) of each; null of what there is none of.
  template <class Memory>
  optim::UnpackedState parts_of(Tensor& tensor, const Memory& memory) const;
  Tensor& find(const std::string& name);
  void wait();
  void watch_pressure();

  std::vector<optim::ParameterGroup> groups;
  Rule rule;
  std::vector<Tensor> tensors;
  std::vector<std::shared_ptr<Model>> models;
};

OffloadedOptimizer::State::State(std::vector<ShardedModel> given,
                                 std::vector<optim::ParameterGroup> given_groups, Rule given_rule)
    : groups(std::move(given_groups)), rule(std::move(given_rule)) {
  for (size_t g = 0; g < groups.size(); ++g) {
    optim::ParameterGroup& group = groups[g];
    group.weight_decay = group.weight_decay.value_or(rule.weight_decay);
    for (const auto& parameter : group.parameters) {
      tensors.push_back({.parameter = parameter,
                         .group = g,
                         .state = nullptr,
                         .moments = std::vector<Shown>(rule.moments.size())});
    }
  }
  for (const ShardedModel& model : given) add(model);
  for (const Tensor& tensor : tensors) {
    if (!tensor.state) {
      throw ConfigError(format("[{}] parameter '{}' is not one of the offloaded model's", rule.name,
                               tensor.parameter.name));
    }
  }
}

void OffloadedOptimizer::State::add(const ShardedModel& sharded) {
  const auto& tiers = rule.tiers_of(sharded);
  auto& engine = *sharded.shared()->engine;
  models.push_back(std::make_shared<Model>(*this, sharded, tiers));
  Model& model = *models.back();
  detail::give_room(engine);  // parameters are compressed already, gradients in the first step
  std::unordered_map<const c10::TensorImpl*, size_t> place;
  for (size_t i = 0; i < tensors.size(); ++i)
    place[tensors[i].parameter.tensor.unsafeGetTensorImpl()] = i;
  for (size_t f = 0; f < engine.flats().size(); ++f) {
    Flat& flat = *engine.flats()[f];
    OffloadedFlat offloaded{.flat = &flat, .tensors = {}};
    const auto& optimized = flat.shard.optimized();
    for (size_t i = 0; i < optimized.size(); ++i) {
      const auto& [name, tensor, range, first, end] = optimized[i];
      const auto found = place.find(tensor.unsafeGetTensorImpl());
      if (found == place.end()) continue;
      const detail::EncodedShard* const encoded = flat.shard.encoded();
      const bool coded = encoded != nullptr && !flat.shard.is_packed();
      tensors[found->second].flat = &flat;
      tensors[found->second].begin = range.begin;
      tensors[found->second].state = std::make_unique<OffloadedState>(
          name, flat.plan().offload->states[i],
          flat.shard.values().narrow(0, range.begin, range.size()), flat.plan().offload->params,
          tiers, coded ? encoded->array(encoded->block().tensors[i]) : codec::CodedArray{});
      offloaded.tensors.push_back(found->second);
    }
    model.flats.emplace(f, std::move(offloaded));
  }
  model.ring = std::make_shared<UpdateRing>(tiers, tiers->site, tiers->ring_bytes);
  tiers->updater = models.back();
}

void OffloadedOptimizer::State::hold_values(Model& model) {
  wait();
  for (const auto& [index, flat] : model.flats) {
    expose(*flat.flat, /*to_write=*/false);
    for (const size_t i : flat.tensors) tensors[i].state->hold_values();
  }
}

// A gradient that others have put in the place of the model's (GradScaler's float32, which float16
// does not hold) is brought where that was; the caller keeps it until it was read.
UpdateInput OffloadedOptimizer::State::input_for(Tensor& tensor, const Flat& flat, bool own) {
  const OffloadTiers& tiers = *flat.plan().offload->tiers;
  const at::Tensor& gradient = tensor.parameter.tensor.grad();
  const at::ScalarType dtype = gradient.scalar_type(), planned = flat.plan().gradient_dtype;
  if (dtype != planned && !(dtype == at::kFloat && planned == at::kHalf)) {
    throw ConfigError(format("[{}] the gradient of '{}' is {}, must be {}", rule.name,
                             tensor.parameter.name, c10::toString(dtype), c10::toString(planned)));
  }
  // Updates in backward are given gradients before they leave the device, unless they add up there.
  const bool on_host =
      flat.plan().offload->grads == Tier::host && (own || !tiers.updates_in_backward());
  const detail::PackedGradient* const packed = flat.offloaded->packed();
  const at::Tensor there =
      own && packed != nullptr
          ? packed->values().narrow(0, tensor.begin, tensor.parameter.tensor.numel())
          : gradient.detach().to(on_host ? at::kCPU : tiers.device).reshape({-1});
  const optim::ParameterGroup& group = groups[tensor.group];
  const int64_t step = ++*tensor.step.data_ptr<int64_t>();
  return {
      .gradient = there,
      .gradient_on_host = on_host,
      .gradient_ready = own && on_host ? flat.offloaded->moved() : memory::computed(tiers.device),
      .factors = rule.factors(
          {.step = step, .lr = rule.lr * group.lr_scale, .weight_decay = *group.weight_decay})};
}

// Hands the flat's gradients to the driver.
void OffloadedOptimizer::State::update(Model& model, size_t index) {
  OffloadedFlat& offloaded = model.flats.at(index);
  OffloadTiers& tiers = *model.tiers;
  if (!std::exchange(model.has_room, true)) detail::give_room(*model.model.shared()->engine);
  struct TensorUpdate {
    OffloadedState* state;
    UpdateInput input;
  };
  std::vector<TensorUpdate> updates;
  std::vector<at::Tensor> gradients;
  detail::PackedGradient* packed = nullptr;  // whose memory the driver makes
  const detail::FlatShard& shard = offloaded.flat->shard;
  if (shard.is_packed()) shard.wait_updated();  // the driver opens and settles it too
  for (const size_t i : offloaded.tensors) {
    if (!tensors[i].state->holds_values()) continue;
    expose(*offloaded.flat, /*to_write=*/true);
    tensors[i].state->adopt_values();
  }
  shard.settle();  // what others wrote
  for (const size_t i : offloaded.tensors) {
    Tensor& tensor = tensors[i];
    const at::Tensor& gradient = tensor.parameter.tensor.grad();
    if (!gradient.defined()) continue;
    if (tensor.updated) {
      throw Error(
          format("[{}] parameter '{}' was updated in a backward already; with clip_mode none "
                 "call step() after each, or accumulate under no_sync()",
                 rule.name, tensor.parameter.name));
    }
    const bool own = offloaded.flat->offloaded->owns(gradient);
    if (own && packed == nullptr) packed = offloaded.flat->offloaded->packed();
    if (!own || packed == nullptr) optim::announce_read(gradient);
    if (tiers.updates_in_backward()) {
      // What everybody has counts once.
      const auto& engine = *model.model.shared()->engine;
      if (offloaded.flat->plan().shard.size() > 1 || engine.groups().reduce.rank() == 0)
        tiers.consumed.push_back(gradient.norm().to(at::kDouble));
    }
    updates.push_back({tensor.state.get(), input_for(tensor, *offloaded.flat, own)});
    if (!own || tiers.updates_in_backward()) gradients.push_back(updates.back().input.gradient);
    tensor.updated = true;
    tensor.forget();
  }
  if (updates.empty()) {
    if (tiers.updates_in_backward()) offloaded.flat->offloaded->let_go({});
    return;
  }
  memory::LaterEvent read, written;
  tiers.driver->run(
      [updates = std::move(updates), ring = model.ring, read, written, &shard, packed]() mutable {
        const at::NoGradGuard no_grad;
        if (shard.is_packed()) shard.open(/*to_write=*/true);
        if (packed != nullptr) packed->open();
        detail::UpdateEvents done;  // each is after those before it
        for (const TensorUpdate& each : updates) done = ring->update(*each.state, each.input);
        if (shard.is_packed() || packed != nullptr) done.written.wait();
        if (packed != nullptr) packed->settle();
        if (shard.is_packed()) shard.settle();
        read.set(done.read);
        written.set(done.written);
      },
      offloaded.flat->plan().name);
  const memory::Event queued = tiers.driver->record();
  model.last = written.after(queued);
  offloaded.flat->shard.set_updating(model.last);
  const memory::Event was_read = read.after(queued);
  if (!gradients.empty())
    tiers.retire(std::make_shared<std::vector<at::Tensor>>(std::move(gradients)), was_read);
  if (tiers.updates_in_backward()) offloaded.flat->offloaded->let_go(was_read);
  if (!tiers.options.advanced.overlap) model.last.wait();
}

OffloadedOptimizer::OffloadedOptimizer(std::vector<ShardedModel> models,
                                       std::vector<optim::ParameterGroup> groups, Rule rule)
    : state_(std::make_unique<State>(std::move(models), std::move(groups), std::move(rule))) {
  set_lr(lr());
}

OffloadedOptimizer::~OffloadedOptimizer() = default;

// After a step has shown what activations it has. Collective.
void OffloadedOptimizer::State::watch_pressure() {
  std::vector<detail::ShardEngine*> engines;
  for (const auto& model : models) engines.push_back(model->model.shared()->engine.get());
  const std::vector<int64_t> measured = detail::measured_activations(engines);
  for (size_t m = 0; m < models.size(); ++m) {
    Model& model = *models[m];
    const int64_t activations = detail::agree_on_activations(*engines[m], measured[m]);
    if (layout::breaks_margin(model.tiers->plan, activations)) {
      std::unordered_map<const c10::TensorImpl*, OffloadedState*> states;
      for (const Tensor& tensor : tensors)
        states[tensor.parameter.tensor.unsafeGetTensorImpl()] = tensor.state.get();
      const auto state_of = [&](size_t flat, size_t tensor) {
        const auto& optimized = engines[m]->flats()[flat]->shard.optimized()[tensor];
        const auto found = states.find(optimized.tensor.unsafeGetTensorImpl());
        return found == states.end() ? nullptr : found->second;
      };
      detail::decide_again(*engines[m], activations,
                           {.ring = model.ring, .state_of = state_of, .wait = [this] { wait(); }});
    }
    detail::agree_on_room(*engines[m]);
  }
}

void OffloadedOptimizer::step() {
  const at::NoGradGuard no_grad;
  detail::ActivationPeak::pause();
  for (const auto& model : state_->models) {
    const bool exact = !model->tiers->updates_in_backward();
    auto& engine = *model->model.shared()->engine;
    if (exact && !engine.window().begin_step()) {
      throw Error(
          format("[{}] parameters have been used since the last backward; step between a backward "
                 "and the next forward",
                 state_->rule.name));
    }
    engine.gradients().before_step();
    for (const auto& [index, flat] : model->flats) {
      if (exact) state_->update(*model, index);
    }
    model->tiers->consumed.clear();
    const bool measures = !std::exchange(model->measured, true);
    model->tiers->driver->run(
        [ring = model->ring, &engine, measures] {
          ring->end_step();
          if (measures) say_ratios(engine);
        },
        "fetch state");
  }
  for (State::Tensor& tensor : state_->tensors) tensor.updated = false;
  state_->watch_pressure();
}

std::vector<optim::NamedTensor> OffloadedOptimizer::lazy_state() {
  std::vector<optim::NamedTensor> all;
  for (State::Tensor& tensor : state_->tensors) {
    for (auto& entry : state_->shown(tensor)) all.push_back(std::move(entry));
  }
  return all;
}

double OffloadedOptimizer::lr() const { return state_->rule.lr; }

void OffloadedOptimizer::set_lr(double lr) {
  if (!(lr >= 0))
    throw ConfigError(format("[{}] lr is {}, must be at least 0", state_->rule.name, lr));
  state_->rule.lr = lr;
}

std::span<optim::ParameterGroup> OffloadedOptimizer::groups() { return state_->groups; }

void OffloadedOptimizer::State::wait() {
  for (const auto& model : models) {
    model->last.wait();
    model->tiers->driver->run([ring = model->ring] { ring->finish(); }, "state to disk");
    model->tiers->driver->record().wait();
    model->tiers->in->record().wait();
    model->tiers->out->record().wait();
  }
}

void OffloadedOptimizer::wait() { state_->wait(); }

bool OffloadedOptimizer::updates_in_backward() const {
  return std::ranges::any_of(state_->models,
                             [](const auto& each) { return each->tiers->updates_in_backward(); });
}

std::vector<optim::NamedTensor> OffloadedOptimizer::State::shown(Tensor& tensor) {
  const at::IntArrayRef sizes = tensor.parameter.tensor.sizes();
  const auto show = [&](Shown& part) {
    auto memory = part.memory.lock();
    if (!memory) {
      memory = std::make_shared<at::Tensor>(at::empty(sizes, tensor.state_type()));
      part = {.memory = memory};
    }
    // Views of it keep the memory too.
    return at::from_blob(
        memory->data_ptr(), sizes, [memory](void*) {}, tensor.state_type());
  };
  const std::string& name = tensor.parameter.name;
  std::vector<optim::NamedTensor> entries;
  for (size_t i = 0; i < rule.moments.size(); ++i)
    entries.push_back({name + "." + rule.moments[i], show(tensor.moments[i])});
  if (tensor.has_master()) entries.push_back({name + ".master", show(tensor.master)});
  if (!rule.moments.empty()) entries.push_back({name + ".step", tensor.step});
  return entries;
}

OffloadedOptimizer::State::Tensor& OffloadedOptimizer::State::find(const std::string& entry) {
  const std::string name = entry.substr(0, entry.rfind('.'));
  const auto found = std::find_if(tensors.begin(), tensors.end(),
                                  [&](const Tensor& each) { return each.parameter.name == name; });
  check(found != tensors.end(), "state() gave the name");
  return *found;
}

template <class Memory>
optim::UnpackedState OffloadedOptimizer::State::parts_of(Tensor& tensor,
                                                         const Memory& memory) const {
  const auto moment = [&](size_t i) -> void* {
    return i < rule.moments.size() ? memory(tensor.moments[i], rule.moments[i]) : nullptr;
  };
  return {moment(0), moment(1), memory(tensor.master, "master")};
}

void OffloadedOptimizer::refresh(const std::string& name) {
  State::Tensor& tensor = state_->find(name);
  const auto [exp_avg, exp_avg_sq, master] =
      state_->parts_of(tensor, [&](State::Shown& part, const std::string& what) -> void* {
        const auto memory = name.ends_with("." + what) ? part.memory.lock() : nullptr;
        if (!memory) return nullptr;
        part.fresh = true;
        return memory->data_ptr();
      });
  if (exp_avg == nullptr && exp_avg_sq == nullptr && master == nullptr) return;
  state_->wait();
  expose(*tensor.flat, /*to_write=*/false);
  tensor.state->unpack(exp_avg, exp_avg_sq, master);
}

void OffloadedOptimizer::adopt(const std::string& name) {
  if (name.ends_with(".step")) return;
  State::Tensor& tensor = state_->find(name);
  // All of them at once, with the first; what was not refreshed was not written.
  const auto [exp_avg, exp_avg_sq, master] =
      state_->parts_of(tensor, [](State::Shown& part, const std::string&) -> void* {
        const auto memory = std::exchange(part.fresh, false) ? part.memory.lock() : nullptr;
        return memory ? memory->data_ptr() : nullptr;
      });
  if (exp_avg == nullptr && exp_avg_sq == nullptr && master == nullptr) return;
  state_->wait();
  expose(*tensor.flat, /*to_write=*/true);
  tensor.state->pack(exp_avg, exp_avg_sq, master);
}

std::vector<optim::NamedTensor> OffloadedOptimizer::state() {
  std::vector<optim::NamedTensor> all = lazy_state();
  for (const auto& entry : all) refresh(entry.name);
  return all;
}

void OffloadedOptimizer::load_state(std::span<const optim::NamedTensor> entries) {
  const at::NoGradGuard no_grad;
  const auto own = state();
  optim::load_named(state_->rule.name + ".load_state", own, entries);
  for (const auto& entry : own) adopt(entry.name);
}

}  // namespace lockstep::parallel
