// SPDX-License-Identifier: Apache-2.0
// Data parallelism inside one process: several devices, one replica of the model on each.
//
//   auto parallel = parallel::data_parallel(*model);       // on all devices that are found
//   auto loss = torch::mse_loss(parallel.forward(batch), target);
//   loss.backward();
//   parallel.sync_gradients();                             // the model has those of the batch
//   optimizer.step();                                      // over model->parameters()
//
// or, with replicas that run by themselves and a choice of how far they may drift apart:
//
//   parallel.set_mode(parallel::BoundedStaleness{2});
//   const auto loss_of = [&](NetImpl& net, size_t replica, int64_t step) {
//     return torch::mse_loss(net.forward(input(replica, step)), target(replica, step));
//   };
//   parallel.run(steps, loss_of, [&] { optimizer.step(); });
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "lockstep/core/torch_fwd.h"
#include "lockstep/parallel/data/ddp.h"

namespace lockstep::parallel {

// How replicas are kept together, in run() and in sync_gradients().
struct Synchronous {};   // all take a step, their gradients are averaged, one update follows
struct Asynchronous {};  // each updates the model with its own gradients and continues
struct BoundedStaleness {
  // In run(): a replica begins a step at most this many steps ahead of the slowest. In
  // sync_gradients(): gradients are used at most this many updates after the values they are of.
  int64_t max = 0;
};
using SyncMode = std::variant<Synchronous, Asynchronous, BoundedStaleness>;

// All CUDA devices, or the CPU once where there are none.
std::vector<c10::Device> detected_devices();

struct DataParallelOptions {
  std::vector<c10::Device> devices = detected_devices();  // one may be named several times
  SyncMode mode = Synchronous{};
};

// What a run has done so far.
struct RunStats {
  std::vector<int64_t> steps = {};  // of each replica whose gradients are in the model
  std::vector<int64_t> waits = {};  // how often each replica waited for others before a step
  int64_t largest_lead = 0;         // steps ahead of the slowest at the beginning of a step
};

namespace detail {
class DataParallel;
using ReplicaForward = std::function<at::Tensor(torch::nn::Module&, std::span<const at::Tensor>)>;
using ReplicaStep = std::function<at::Tensor(torch::nn::Module&, size_t replica, int64_t step)>;
}  // namespace detail

// What does not depend on the model's type. A value: copies share everything.
class DataParallelHandle {
 public:
  DataParallelHandle(torch::nn::Module& model, DataParallelOptions options);

  // After backward through outputs of forward() or forward_parallel(): adds the gradients of all
  // replicas to the model's, in the order of the replicas.
  void reduce_gradients();
  // The same, as the mode says. Synchronous: one update. After forward() it is made of the
  // gradients of the batch; after forward_parallel(), where each output has a loss of its own, of
  // the average over the replicas. Asynchronous: an update for each replica, with its gradients
  // alone. BoundedStaleness: the replicas in max + 1 parts, an update for each part. `update`
  // (optimizer.step) is called for each; it may be left out, and called by hand, where there is
  // one. What the model's gradients held before is a part of the first update. Does nothing in eval
  // mode.
  void sync_gradients(const std::function<void()>& update = {});
  // Clears the gradients of the model, and those of replicas that are not yet in it.
  void zero_grad();
  // Moves all replicas. ConfigError where they are on several devices: make a new wrapper.
  void to(c10::Device device);

  const std::vector<c10::Device>& devices() const;
  SyncMode mode() const;
  // At any time, from any thread, during a run too. Synchronous is left when all replicas have
  // finished their step, other modes at once.
  void set_mode(SyncMode mode);
  // Of the run in progress, or the last one. From any thread.
  RunStats stats() const;

 protected:
  at::Tensor forward(std::vector<at::Tensor> batch, const detail::ReplicaForward& call);
  std::vector<at::Tensor> forward_parallel(const std::vector<at::Tensor>& inputs,
                                           const detail::ReplicaForward& call);
  RunStats run(int64_t steps, const detail::ReplicaStep& step, const std::function<void()>& update);

 private:
  std::shared_ptr<detail::DataParallel> replicas_;
};

// Model is a std::shared_ptr to a module, or a module holder (torch::nn::Sequential, your
// TORCH_MODULE); for more than one device it is Cloneable. It is moved to the first device and is
// its replica; the others are clones, each with a thread of its own. Parameters and buffers are the
// model's: whatever changes them, replicas get the values before they are used. Of what a forward
// writes into buffers (batch norm), only replica 0's is kept.
template <class Model>
class DataParallel : public DataParallelHandle {
 public:
  using Module = std::remove_reference_t<decltype(*std::declval<Model&>())>;

  explicit DataParallel(Model model, DataParallelOptions options = {})
      : DataParallelHandle(*model, std::move(options)), model_(std::move(model)) {}

  // Cuts the tensors along dimension 0 as at::chunk does, calls the model's forward with the parts
  // on all devices at the same time, and concatenates the results on the first device; scalars
  // become a vector. With fewer rows than replicas, some have nothing to do.
  template <std::same_as<at::Tensor>... Tensors>
  at::Tensor forward(const Tensors&... batch) {
    static_assert(sizeof...(batch) > 0);
    return DataParallelHandle::forward({batch...}, call<sizeof...(batch)>);
  }

  // The same with an input and an output for each device, instead of parts of one.
  std::vector<at::Tensor> forward_parallel(const std::vector<at::Tensor>& inputs) {
    return DataParallelHandle::forward_parallel(inputs, call<1>);
  }

  // Every replica takes `steps` steps: `step(Module&, size_t replica, int64_t step)`, called on its
  // thread, returns a loss, of which backward() is called. `update()` (optimizer.step) is called
  // with the gradients in the model, on one of these threads, one at a time. What any of them
  // throws ends the run and is rethrown. Synchronous does what one process does that averages the
  // gradients of the same micro-batches.
  template <class Step>
  RunStats run(int64_t steps, const Step& step, const std::function<void()>& update) {
    return DataParallelHandle::run(
        steps,
        [&](torch::nn::Module& replica, size_t index, int64_t number) -> at::Tensor {
          return step(dynamic_cast<Module&>(replica), index, number);
        },
        update);
  }

  Model& module() { return model_; }
  // Those of the model; replicas follow.
  void train(bool on = true) { model_->train(on); }
  void eval() { model_->eval(); }
  bool is_training() const { return model_->is_training(); }
  auto named_parameters() const { return detail::listed_once(model_->named_parameters()); }
  auto parameters() const { return named_parameters().values(); }

 private:
  template <size_t kCount>
  static at::Tensor call(torch::nn::Module& replica, std::span<const at::Tensor> inputs) {
    return [&]<size_t... I>(std::index_sequence<I...>) {
      return dynamic_cast<Module&>(replica).forward(inputs[I]...);
    }
    (std::make_index_sequence<kCount>());
  }

  Model model_;
};

// Pass a module (*model), its holder, or a std::shared_ptr to it.
template <std::derived_from<torch::nn::Module> Module>
DataParallel<std::shared_ptr<Module>> data_parallel(Module& model,
                                                    DataParallelOptions options = {}) {
  return DataParallel<std::shared_ptr<Module>>({model.weak_from_this().lock(), &model},
                                               std::move(options));
}
template <class Model>
requires requires(Model model) { *model; }
DataParallel<Model> data_parallel(Model model, DataParallelOptions options = {}) {
  return DataParallel<Model>(std::move(model), std::move(options));
}

}  // namespace lockstep::parallel
