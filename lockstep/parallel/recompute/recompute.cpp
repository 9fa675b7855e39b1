// SPDX-License-Identifier: Apache-2.0
// Saved tensors are intercepted by an engine in front of the default one, the only way to do so
// from C++: autograd asks that for hooks whenever a node saves a tensor. In the first call the
// hooks keep a number instead of the tensor; the first time that backward wants one of them, the
// function is called again under hooks that collect the tensors in the same order.
#include "lockstep/parallel/recompute/recompute.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include <mutex>
#include <optional>
#include <set>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/log.h"
#include "lockstep/core/trace.h"
#include "lockstep/optim/autocast.h"
#include "lockstep/parallel/intercept/interception.h"
#include "lockstep/parallel/intercept/kept_products.h"
#include "lockstep/parallel/recompute/past.h"
#include "lockstep/parallel/recompute/saved_tensor_engine.h"
#include "lockstep/parallel/recompute/stored_inputs.h"

namespace lockstep::parallel::detail {

using Tensors = std::vector<at::Tensor>;

namespace {

using torch::autograd::SavedVariableHooks;

// Thrown out of the second call when all that was asked for is there.
struct Enough {};

}  // namespace

// One call of a function, and its repetition.
struct Frame {
  using Again = std::function<void(const Tensors&)>;
  using Inputs = std::function<Tensors()>;

  Frame(Again again, Inputs inputs, RecomputeOptions options)
      : again(std::move(again)),
        inputs(std::move(inputs)),
        random(std::move(options.random)),
        was(random ? *random : nn::RandomContext{}),
        modules(std::move(options.modules)),
        cpu(optim::current_autocast(at::kCPU)),
        cuda(optim::current_autocast(at::kCUDA)) {
    if (options.keep_products) products.emplace();
  }

  // Something that autograd would keep; returns its number.
  size_t keep(const at::Tensor& tensor);
  at::Tensor take(size_t index);
  void drop(size_t index);
  void repeat();

  const Again again;
  const Inputs inputs;
  const std::shared_ptr<nn::RandomContext> random;
  const nn::RandomContext was;
  const std::vector<std::shared_ptr<torch::nn::Module>> modules;
  const GeneratorStates generators;
  const optim::AutocastOptions cpu, cuda;
  std::optional<KeptProducts> products;
  // What was saved in the first call, and in which version: a weight that is written before
  // backward would be another one in the second.
  struct Kept {
    c10::VariableVersion version;
    int64_t saved;
  };
  std::vector<Kept> kept;
  std::vector<at::Tensor> values;  // collected in the second; dropped one by one
  std::vector<int64_t> versions;   // of the values when they were saved
  std::set<size_t> unwanted;       // dropped before they were collected
  std::mutex mutex;                // backward has a thread for each device
};

namespace {

// Of one scope in which saved tensors go to a store.
struct SavedTensors {
  // Smaller tensors take more of the store's books than of memory.
  static constexpr size_t kLeastBytes = 4096;

  struct Stored {
    // Holds the storage's place, not its memory: another storage never looks like this one.
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    int64_t offset;
    std::vector<int64_t> sizes, strides;
    uint32_t version;
    std::weak_ptr<StoredInputs> inputs;
  };

  // A tensor that several nodes save is stored once.
  std::shared_ptr<StoredInputs> put(const at::Tensor& tensor);

  const std::shared_ptr<ActivationStore> store;
  std::set<const c10::StorageImpl*> stay;  // in memory
  std::vector<Stored> known = {};
};

struct Call {
  std::shared_ptr<Frame> frame = {};
  bool collects = false;
  std::shared_ptr<SavedTensors> stores = {};  // instead of a frame
};

// Whose saved tensors these are is a matter of the thread that runs the operators, as for autograd
// itself; there is nothing else that the engine's call could find it by.
std::vector<Call>& active() {
  thread_local std::vector<Call> stack;
  return stack;
}

class Entry {
 public:
  explicit Entry(Call entry) { active().push_back(std::move(entry)); }
  ~Entry() { active().pop_back(); }
  Entry(const Entry&) = delete;
  Entry& operator=(const Entry&) = delete;
};

// Newer versions ask hooks of Python for more.
template <class Base>
struct Complete : Base {};
template <class Base>
requires requires(const Base& hooks) { hooks.retrieve_unpack_hook_data(); }
struct Complete<Base> : Base {
  decltype(std::declval<const Base&>().retrieve_unpack_hook_data()) retrieve_unpack_hook_data()
      const override {
    throw Error("[recompute] recomputed tensors cannot be traced");
  }
};

class Numbered : public Complete<SavedVariableHooks> {
 public:
  explicit Numbered(std::shared_ptr<Frame> frame) : frame_(std::move(frame)) {}
  // A node that is done with its tensor, or that backward will not reach.
  ~Numbered() override { frame_->drop(index_); }
  void call_pack_hook(const at::Tensor& tensor) override { index_ = frame_->keep(tensor); }
  at::Tensor call_unpack_hook() override { return frame_->take(index_); }

 private:
  std::shared_ptr<Frame> frame_;
  size_t index_ = SIZE_MAX;  // until it is given something to keep
};

class Collecting : public Complete<SavedVariableHooks> {
 public:
  explicit Collecting(Frame& frame) : frame_(frame) {}
  void call_pack_hook(const at::Tensor& tensor) override {
    frame_.values.push_back(tensor.detach());
    frame_.versions.push_back(frame_.values.back()._version());
    if (frame_.values.size() == frame_.kept.size()) throw Enough{};
  }
  at::Tensor call_unpack_hook() override {
    throw Error("[recompute] the function runs a backward of its own, must not");
  }

 private:
  Frame& frame_;
};

class Storing : public Complete<SavedVariableHooks> {
 public:
  explicit Storing(std::shared_ptr<SavedTensors> saved) : saved_(std::move(saved)) {}
  void call_pack_hook(const at::Tensor& tensor) override {
    inputs_ = saved_->put(tensor);
    saved_.reset();
  }
  at::Tensor call_unpack_hook() override { return inputs_->tensors()[0]; }

 private:
  std::shared_ptr<SavedTensors> saved_;
  std::shared_ptr<StoredInputs> inputs_;
};

std::unique_ptr<SavedVariableHooks> hooks_for_saved_tensor() {
  const auto& stack = active();
  if (stack.empty()) return nullptr;
  const Call& top = stack.back();
  if (top.stores) return std::make_unique<Storing>(top.stores);
  if (top.collects) return std::make_unique<Collecting>(*top.frame);
  return std::make_unique<Numbered>(top.frame);
}

// A tensor of which functions compute parts, until they are done: kept or, where a function is
// recomputed around them, collected with what that keeps.
class TiledInput {
 public:
  explicit TiledInput(const at::Tensor& x) : requires_grad_(x.requires_grad()) {
    if (!active().empty() && active().back().frame) {
      outer_ = active().back().frame;
      index_ = outer_->keep(x);
    } else if (!active().empty()) {
      stored_ = active().back().stores->put(x);
    } else {
      stored_ = std::make_shared<StoredInputs>(nullptr, std::vector<at::Tensor>{x});
    }
  }
  ~TiledInput() {
    if (outer_) outer_->drop(index_);
  }
  TiledInput(const TiledInput&) = delete;
  TiledInput& operator=(const TiledInput&) = delete;

  at::Tensor part(int64_t dim, int64_t begin, int64_t size) const {
    const at::Tensor found = whole().detach().narrow(dim, begin, size);
    if (!requires_grad_) return found;
    // Autocast keeps what it casts of leaves, and this is none.
    const c10::AutoGradMode grad(true);
    return found.set_requires_grad(true).view_as(found);
  }

 private:
  // What was on disk or in host memory is read once for all parts.
  at::Tensor whole() const {
    if (outer_) return outer_->take(index_);
    if (stored_->is_in_memory()) return stored_->tensors()[0];
    const std::lock_guard lock(mutex_);
    if (!read_.defined()) read_ = stored_->tensors()[0];
    return read_;
  }

  bool requires_grad_;
  std::shared_ptr<Frame> outer_;
  size_t index_ = 0;
  std::shared_ptr<StoredInputs> stored_;
  mutable std::mutex mutex_;  // backward has a thread for each device
  mutable at::Tensor read_;
};

// Without hooks the function is a plain call, whose activations are all kept.
bool can_recompute() {
  static const bool allowed = [] {
    const bool is = is_allowed(Interception::saved_tensors);
    if (!is) {
      log::warn(
          "[recompute] LOCKSTEP_INTERCEPT leaves saved_tensors out: recompute keeps all "
          "activations in memory, and an ActivationStore stores nothing");
    }
    return is;
  }();
  return allowed;
}

std::shared_ptr<StoredInputs> SavedTensors::put(const at::Tensor& tensor) {
  const auto in_memory = [&] {
    return std::make_shared<StoredInputs>(nullptr, std::vector<at::Tensor>{tensor});
  };
  if (!tensor.has_storage() || tensor.is_inference() || tensor.nbytes() < kLeastBytes) {
    return in_memory();
  }
  c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
  if (stay.contains(storage)) return in_memory();
  const uint32_t version = tensor._version();
  for (const Stored& each : known) {
    if (each.storage._unsafe_get_target() != storage || each.offset != tensor.storage_offset() ||
        each.version != version || tensor.sizes() != each.sizes ||
        tensor.strides() != each.strides) {
      continue;
    }
    if (auto inputs = each.inputs.lock()) return inputs;
  }
  auto inputs = std::make_shared<StoredInputs>(store, std::vector<at::Tensor>{tensor});
  known.push_back({.storage = c10::weak_intrusive_ptr<c10::StorageImpl>(
                       c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage)),
                   .offset = tensor.storage_offset(),
                   .sizes = tensor.sizes().vec(),
                   .strides = tensor.strides().vec(),
                   .version = version,
                   .inputs = inputs});
  return inputs;
}

}  // namespace

void Frame::repeat() {
  values.clear();
  versions.clear();
  const std::vector<at::Tensor> found = inputs();
  const trace::Span span("recompute", "recompute");
  const Past past(generators, random, was);
  const UnchangedBuffers buffers(modules);
  if (products) products->begin_second_call();
  const KeptProducts::Scope kept_products(products ? &*products : nullptr);
  const optim::AutocastGuard cpu_autocast(cpu);
  std::optional<optim::AutocastGuard> cuda_autocast;
  if (at::hasCUDA()) cuda_autocast.emplace(cuda);
  const c10::AutoGradMode grad(true);
  const Entry entry(
      {.frame = std::shared_ptr<Frame>(std::shared_ptr<Frame>(), this), .collects = true});
  try {
    again(found);
  } catch (const Enough&) {
  }
  for (const size_t index : unwanted) {
    if (index < values.size()) values[index].reset();
  }
}

size_t Frame::keep(const at::Tensor& tensor) {
  const auto& version = torch::autograd::impl::version_counter(tensor);
  kept.push_back({version, version.current_version()});
  if (products) products->need_all_so_far();
  return kept.size() - 1;
}

at::Tensor Frame::take(size_t index) {
  const std::lock_guard lock(mutex);
  if (kept[index].version.current_version() != kept[index].saved) {
    throw Error(
        "[recompute] a tensor that backward needs was changed in place since the function was "
        "called, as by a step of the optimizer; run backward first");
  }
  if (index >= values.size() || !values[index].defined()) repeat();
  if (values.size() != kept.size()) {
    throw Error(
        format("[recompute] the function kept {} tensors for backward, and {} when it was "
               "called again; it must compute the same again",
               kept.size(), values.size()));
  }
  if (values[index]._version() != versions[index]) {
    throw Error("[recompute] a tensor that backward needs was changed in place by the function");
  }
  return values[index];
}

void Frame::drop(size_t index) {
  at::Tensor value;  // its memory goes when the lock is no longer held
  const std::lock_guard lock(mutex);
  unwanted.insert(index);
  if (index < values.size()) value = std::move(values[index]);
}

struct RecomputeScope::Active {
  explicit Active(std::shared_ptr<Frame> frame)
      : products(frame->products ? &*frame->products : nullptr),
        entry({.frame = std::move(frame)}),
        scope(products) {}
  ~Active() {
    if (products != nullptr) products->end_first_call();
  }
  Active(const Active&) = delete;
  Active& operator=(const Active&) = delete;

  KeptProducts* const products;
  const Entry entry;
  const KeptProducts::Scope scope;
};

RecomputeScope::RecomputeScope(std::function<void(const Tensors&)> again, const Tensors& inputs,
                               RecomputeOptions options) {
  if (!c10::GradMode::is_enabled() || !can_recompute()) return;
  install_saved_tensor_engine(&hooks_for_saved_tensor);
  const auto stored = std::make_shared<StoredInputs>(std::move(options.store), inputs);
  active_ = std::make_unique<Active>(std::make_shared<Frame>(
      std::move(again), [stored] { return stored->tensors(); }, std::move(options)));
}

RecomputeScope::~RecomputeScope() = default;

namespace {

// Calls body(part, where it begins) and puts the results together.
template <class Body>
at::Tensor put_together(const at::Tensor& x, const TileOptions& options, Body body) {
  std::vector<at::Tensor> parts;
  int64_t begin = 0;
  for (const at::Tensor& part : x.split(options.size, options.dim)) {
    parts.push_back(body(part, begin));
    begin += part.size(options.dim);
  }
  return at::cat(parts, options.dim);
}

}  // namespace

StoreScope::StoreScope(std::shared_ptr<ActivationStore> store,
                       const std::vector<std::shared_ptr<torch::nn::Module>>& modules)
    : active_(c10::GradMode::is_enabled() && can_recompute()) {
  if (!active_) return;
  install_saved_tensor_engine(&hooks_for_saved_tensor);
  auto saved = std::make_shared<SavedTensors>(SavedTensors{.store = std::move(store), .stay = {}});
  const auto keep = [&](const std::vector<at::Tensor>& tensors) {
    for (const at::Tensor& tensor : tensors) {
      if (tensor.defined() && tensor.has_storage()) {
        saved->stay.insert(tensor.storage().unsafeGetStorageImpl());
      }
    }
  };
  for (const auto& module : modules) {
    keep(module->parameters(/*recurse=*/false));
    keep(module->buffers(/*recurse=*/false));
  }
  active().push_back({.stores = std::move(saved)});
}

StoreScope::~StoreScope() {
  if (active_) active().pop_back();
}

}  // namespace lockstep::parallel::detail

namespace lockstep::parallel {

at::Tensor in_tiles(const TileFunction& function, const at::Tensor& x, const TileOptions& options) {
  using namespace detail;
  if (!c10::GradMode::is_enabled() || !can_recompute()) return put_together(x, options, function);
  install_saved_tensor_engine(&hooks_for_saved_tensor);
  // Products inside are not kept for the function around.
  const KeptProducts::Scope none(nullptr);
  if (!active().empty() && active().back().collects) {
    // That is called again for what it keeps; parts have frames of their own, of the first call,
    // and what they save here goes to frames that nothing asks. Without gradients some functions
    // compute other values, such as linear layers in 8 bits.
    Collecting(*active().back().frame).call_pack_hook(x);
    return put_together(x, options, [&](const at::Tensor& part, int64_t begin) {
      const Entry entry(
          {.frame = std::make_shared<Frame>(Frame::Again(), Frame::Inputs(), RecomputeOptions{})});
      const at::Tensor out = function(part, begin);
      return out.detach().set_requires_grad(out.requires_grad());
    });
  }
  const auto input = std::make_shared<TiledInput>(x);
  return put_together(x, options, [&](const at::Tensor& part, int64_t begin) {
    const auto frame = std::make_shared<Frame>(
        [function, begin](const Tensors& again) { static_cast<void>(function(again[0], begin)); },
        [input, dim = options.dim, begin, size = part.size(options.dim)] {
          return Tensors{input->part(dim, begin, size)};
        },
        RecomputeOptions{.random = options.random});
    const Entry entry({.frame = frame});
    return function(part, begin);
  });
}

}  // namespace lockstep::parallel
