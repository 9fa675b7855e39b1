#include "lockstep/train/trained_model.h"

#include "lockstep/config/pipeline.h"
#include "lockstep/train/data_parallel_model.h"
#include "lockstep/train/pipelined_model.h"

namespace lockstep::train {

std::unique_ptr<TrainedModel> make_model(const config::TrainConfig& config, c10::Device device,
                                         const mesh::Mesh& mesh) {
  if (config::is_pipelined(config.parallel))
    return std::make_unique<PipelinedModel>(config, device, mesh);
  return std::make_unique<DataParallelModel>(config, device, mesh["dp"]);
}

}  // namespace lockstep::train
