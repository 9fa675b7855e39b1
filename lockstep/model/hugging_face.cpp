#include "lockstep/model/hugging_face.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "lockstep/comm/tensor.h"
#include "lockstep/config/hf_model.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/formats/dtype_names.h"
#include "lockstep/formats/hf_directory.h"

namespace lockstep::model {

void load_hugging_face(LanguageModelImpl& model, const std::string& folder) {
  const at::NoGradGuard no_grad;
  formats::HfDirectory directory(folder);
  const auto parameters = model.named_parameters();
  for (const config::HfPart& part : config::hf_parts(model.spec())) {
    const std::string prefixed = "transformer." + part.theirs;
    const std::string& name = directory.contains(prefixed) ? prefixed : part.theirs;
    const formats::HfTensor found = directory.find(name);
    const auto dtype = formats::dtype_of(found.dtype);
    if (!dtype || !is_floating(*dtype)) {
      throw CheckpointError(
          format("{}: {} has dtype {}, must be a floating one", folder, name, found.dtype));
    }
    // Only ever read; torch has no tensors of constant memory.
    at::Tensor source = at::from_blob(const_cast<std::byte*>(found.bytes.data()), found.shape,
                                      comm::detail::to_scalar_type(*dtype));
    if (part.transposed && source.dim() == 2) source = source.t();
    const at::Tensor target = parameters[part.ours].narrow(0, part.rows.begin, part.rows.size());
    if (source.sizes() != target.sizes()) {
      throw CheckpointError(format("{}: {} is ({}), must be ({}) for {}", folder, name,
                                   join(source.sizes()), join(target.sizes()), part.ours));
    }
    target.copy_(source);
  }
}

}  // namespace lockstep::model
