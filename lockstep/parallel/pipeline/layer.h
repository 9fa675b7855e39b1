// SPDX-License-Identifier: Apache-2.0
// What a pipeline is built from: layers that a rank builds only if they are its own.
//
//   std::vector<parallel::Layer> layers;
//   layers.push_back(parallel::layer("embed", [] { return torch::nn::Embedding(50257, 768); }));
//   for (int i = 0; i < 12; ++i)
//     layers.push_back(parallel::layer(fmt::format("blocks.{}", i), [] { return Block(768); }));
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <concepts>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/layout/parallel_config.h"
#include "lockstep/parallel/data/ddp.h"
#include "lockstep/parallel/recompute/recompute.h"

namespace lockstep::parallel {

// What goes from layer to layer, and from stage to stage.
using Tensors = std::vector<at::Tensor>;
using LayerForward = std::function<Tensors(const Tensors&)>;

struct Layer {
  // Builds the layer's modules and registers them in the stage's module, under names that are its
  // own in the whole model; returns what computes with them. Called on the rank that has the layer.
  std::function<LayerForward(torch::nn::Module& stage)> build;
  // Off: what it keeps for backward stays in memory whatever is done about activations. For a layer
  // that keeps little, or that is the last and would be computed twice in a row.
  bool recompute = true;
  // The path of a module that another layer has too, whose parameters are tied: see tied_layer().
  std::string tied = {};
  // Instead of what the other layers do about their activations.
  std::optional<layout::Recompute> own_recompute = std::nullopt;
};

// Builds the layers in the stage's module and returns what computes with them, with `recompute`
// applied to those that allow it. none with a store: what autograd saves is stored. ConfigError for
// a tied layer whose module no layer before it has.
std::vector<LayerForward> build_layers(std::span<const Layer> layers, torch::nn::Module& stage,
                                       layout::Recompute recompute,
                                       const RecomputeOptions& options = {});

// For a Layer::build of your own: registers a layer's module in the stage's, under a path in which
// dots separate modules. Throws ConfigError if another layer has that path.
void register_layer(torch::nn::Module& stage, const std::string& path,
                    std::shared_ptr<torch::nn::Module> module);
// The module that a layer before this one has registered in the stage under this path, or null.
std::shared_ptr<torch::nn::Module> find_layer(const torch::nn::Module& stage,
                                              const std::string& path);

namespace detail {

// The module of this path below `root`; modules on the way that are not there are made.
torch::nn::Module& container(torch::nn::Module& root, const std::string& path);
// The same for a part of the layers: `untied` are paths of tied layers whose modules other parts
// must have.
std::vector<LayerForward> build_stage_layers(std::span<const Layer> layers,
                                             torch::nn::Module& stage, layout::Recompute recompute,
                                             const RecomputeOptions& options,
                                             std::set<std::string>& untied);
// Paths of the modules that layers have registered in the stage, without those below them and those
// of `untied`.
std::vector<std::string> layer_names(const torch::nn::Module& stage,
                                     const std::set<std::string>& untied);
[[noreturn]] void refuse_tied(const std::string& path, const std::vector<std::string>& names);
// As a stage computes it.
LayerForward recomputed(LayerForward forward, layout::Recompute recompute,
                        RecomputeOptions options);
[[noreturn]] void refuse_inputs(const std::string& layer, size_t count);
[[noreturn]] void refuse_type(const std::string& layer);

// What a holder holds.
template <class Holder>
auto pointer_of(const Holder& module) {
  if constexpr (requires { module.ptr(); }) {
    return module.ptr();
  } else {
    return module;
  }
}

template <class Module>
Tensors call(void* object, const std::string& name, const Tensors& in) {
  Module& module = *static_cast<Module*>(object);
  Tensors out;
  const auto run = [&](const auto&... arguments) {
    if constexpr (requires { module.forward(arguments...); }) {
      collect_tensors(module.forward(arguments...), out);
    } else if constexpr (requires { module.forward(in); }) {
      collect_tensors(module.forward(in), out);
    } else {
      refuse_inputs(name, in.size());
    }
  };
  switch (in.size()) {
    case 1:
      run(in[0]);
      break;
    case 2:
      run(in[0], in[1]);
      break;
    case 3:
      run(in[0], in[1], in[2]);
      break;
    case 4:
      run(in[0], in[1], in[2], in[3]);
      break;
    default:
      run(in);
  }
  return out;
}

// A module whose type is known to `call` alone, so that not every layer is a type of its own:
// programs with many layers compile faster.
struct CallableModule {
  std::shared_ptr<torch::nn::Module> module;
  void* object;
  Tensors (*call)(void* object, const std::string& layer, const Tensors& in);
};

template <class Module>
CallableModule callable(std::shared_ptr<Module> module) {
  Module* const object = module.get();
  return {std::move(module), object, &call<Module>};
}

Layer module_layer(std::string name, std::function<CallableModule()> make);

}  // namespace detail

// A layer that is one module, registered under `name`, in which dots separate modules. `make`
// returns its holder or a shared_ptr to it. Its forward takes as many tensors as the layer before
// gives, or a std::vector of them, and returns a tensor, or tuples and vectors of such.
template <class Make>
Layer layer(std::string name, Make make) {
  return detail::module_layer(std::move(name), [make = std::move(make)] {
    return detail::callable(detail::pointer_of(make()));
  });
}

// A layer that computes with the parameters of another layer, such as an output projection with the
// weight of the embedding. `name` and `make` are those of the other layer, which comes first.
// `forward(module, inputs)` is called with the module and returns a tensor, or tuples and vectors
// of such. The parameters are tied on any number of ranks: where the two layers are in different
// stages, the first stage's are trained, the other stage has a copy and returns its gradients.
// ConfigError when the model is built, with the names that exist, if no other layer has this one.
template <class Make, class Forward>
Layer tied_layer(std::string name, Make make, Forward forward) {
  const auto build = [name, make = std::move(make),
                      forward = std::move(forward)](torch::nn::Module& stage) {
    using Module = typename decltype(detail::pointer_of(make()))::element_type;
    std::shared_ptr<Module> shared;
    if (const auto found = find_layer(stage, name)) {
      shared = std::dynamic_pointer_cast<Module>(found);
      if (!shared) detail::refuse_type(name);
    } else {
      shared = detail::pointer_of(make());
      register_layer(stage, name, shared);
    }
    return LayerForward([shared, forward](const Tensors& in) {
      Tensors out;
      detail::collect_tensors(forward(*shared, in), out);
      return out;
    });
  };
  return {.build = build, .tied = name};
}

// A layer without parameters: a function of tensors.
template <class Function>
requires std::invocable<Function, const Tensors&> Layer function_layer(Function function) {
  return {[function = std::move(function)](torch::nn::Module&) { return LayerForward(function); }};
}

}  // namespace lockstep::parallel
