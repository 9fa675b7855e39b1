// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/pipeline/layer.h"

#include <algorithm>
#include <set>
#include <typeinfo>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::parallel {

void register_layer(torch::nn::Module& stage, const std::string& path,
                    std::shared_ptr<torch::nn::Module> module) {
  const size_t dot = path.rfind('.');
  torch::nn::Module& parent =
      dot == std::string::npos ? stage : detail::container(stage, path.substr(0, dot));
  const std::string name = dot == std::string::npos ? path : path.substr(dot + 1);
  if (name.empty() || parent.named_children().contains(name)) {
    throw ConfigError(
        format("[pipeline] a layer is named '{}', must be a name that no other layer has; build a "
               "layer with the parameters of another one with tied_layer()",
               path));
  }
  parent.register_module(name, std::move(module));
}

std::shared_ptr<torch::nn::Module> find_layer(const torch::nn::Module& stage,
                                              const std::string& path) {
  const auto modules = stage.named_modules("", /*include_self=*/false);
  const auto* const found = modules.find(path);
  return found != nullptr ? *found : nullptr;
}

Layer detail::module_layer(std::string name, std::function<CallableModule()> make) {
  return {[name = std::move(name), make = std::move(make)](torch::nn::Module& stage) {
    const CallableModule made = make();
    register_layer(stage, name, made.module);
    return LayerForward(
        [made, name](const Tensors& in) { return made.call(made.object, name, in); });
  }};
}

LayerForward detail::recomputed(LayerForward forward, layout::Recompute recompute,
                                RecomputeOptions options) {
  if (recompute == layout::Recompute::none && !options.store) return forward;
  if (recompute == layout::Recompute::none) {
    return [forward = std::move(forward), options = std::move(options)](const Tensors& x) {
      const StoreScope scope(options.store, options.modules);
      return forward(x);
    };
  }
  options.keep_products = recompute == layout::Recompute::selective;
  return [forward = std::move(forward), options = std::move(options)](const Tensors& x) {
    return parallel::recompute(forward, x, options);
  };
}

std::vector<LayerForward> build_layers(std::span<const Layer> layers, torch::nn::Module& stage,
                                       layout::Recompute recompute,
                                       const RecomputeOptions& options) {
  std::set<std::string> untied;
  auto built = detail::build_stage_layers(layers, stage, recompute, options, untied);
  for (const std::string& path : untied) {
    // Layers of the program's own may all say that they are tied.
    if (std::ranges::count(layers, path, &Layer::tied) == 1)
      detail::refuse_tied(path, detail::layer_names(stage, untied));
  }
  return built;
}

namespace detail {

std::vector<LayerForward> build_stage_layers(std::span<const Layer> layers,
                                             torch::nn::Module& stage, layout::Recompute recompute,
                                             const RecomputeOptions& options,
                                             std::set<std::string>& untied) {
  std::vector<LayerForward> built;
  std::set<std::shared_ptr<torch::nn::Module>> known;
  for (const Layer& layer : layers) {
    if (!layer.tied.empty() && !find_layer(stage, layer.tied)) untied.insert(layer.tied);
    LayerForward forward = layer.build(stage);
    RecomputeOptions again = options;
    const layout::Recompute how = layer.own_recompute.value_or(recompute);
    const bool leaves = how != layout::Recompute::none && !layer.recompute;
    for (const auto& module : stage.modules(/*include_self=*/false)) {
      if (known.insert(module).second) again.modules.push_back(module);
    }
    // It may compute with modules of layers before it.
    if (again.modules.empty()) again.modules.assign(known.begin(), known.end());
    built.push_back(leaves ? std::move(forward)
                           : recomputed(std::move(forward), how, std::move(again)));
  }
  return built;
}

std::vector<std::string> layer_names(const torch::nn::Module& stage,
                                     const std::set<std::string>& untied) {
  std::vector<std::string> names;
  for (const auto& item : stage.named_modules("", /*include_self=*/false)) {
    const torch::nn::Module& module = *item.value();
    if (typeid(module) == typeid(torch::nn::Module)) continue;  // on the way to others
    const bool below = std::ranges::any_of(
        names, [&](const std::string& name) { return item.key().starts_with(name + "."); });
    if (!below && !untied.contains(item.key())) names.push_back(item.key());
  }
  return names;
}

void refuse_tied(const std::string& path, const std::vector<std::string>& names) {
  throw ConfigError(format(
      "[pipeline] a tied layer computes with the parameters of '{}', which no layer before it "
      "has; the layers with parameters are {}",
      path, join(names)));
}

torch::nn::Module& container(torch::nn::Module& root, const std::string& path) {
  torch::nn::Module* module = &root;
  for (size_t begin = 0; begin < path.size();) {
    const size_t end = std::min(path.find('.', begin), path.size());
    const std::string name = path.substr(begin, end - begin);
    const auto children = module->named_children();
    module = children.contains(name)
                 ? children[name].get()
                 : module->register_module(name, std::make_shared<torch::nn::Module>()).get();
    begin = end + 1;
  }
  return *module;
}

void refuse_type(const std::string& layer) {
  throw ConfigError(format(
      "[pipeline] a tied layer computes with '{}', whose module has another type there; both "
      "layers must make the same module",
      layer));
}

void refuse_inputs(const std::string& layer, size_t count) {
  throw ConfigError(format(
      "[pipeline] layer '{}' is given {} tensors, which its forward does not take", layer, count));
}

}  // namespace detail
}  // namespace lockstep::parallel
