/* The collectives of a divided vocabulary (flce_comm), by three operators that flce/collectives.py
 * implements with torch.distributed: the stable ABI has no process groups, and the arguments of
 * torch's functional collectives have no stable type. */
#ifndef FLCE_OP_COMM_H
#define FLCE_OP_COMM_H

#include "binding/torch_device.h"
#include "comm.h"

namespace {

#define COMM_SCHEMA "(Tensor(a!) received, Tensor sent, str group, int slot) -> ()"

/* The table of a call; NULL if the caller gives no group. */
class Collectives {
 public:
  Collectives(DeviceId id, int64_t ranks, const std::optional<std::string>& group)
      : id_(id), ranks_(ranks), group_(group.value_or("")), table_{this, gather, exchange, wait} {}
  Collectives(const Collectives&) = delete;
  Collectives& operator=(const Collectives&) = delete;

  const flce_comm* table() const { return group_.empty() ? nullptr : &table_; }

 private:
  template <typename T>
  static StableIValue value(const T& item) {
    return torch::stable::detail::from(item);
  }

  Tensor bytes_of(const void* data, int64_t bytes) const {
    int64_t stride = 1;
    AtenTensorHandle handle;
    TORCH_ERROR_CODE_CHECK(aoti_torch_create_tensor_from_blob(
        const_cast<void*>(data), 1, &bytes, &stride, 0,
        torch::stable::detail::to<int32_t>(value(ScalarType::Byte)), id_.type, id_.index, &handle));
    return Tensor(handle);
  }

  static flce_status called(const char* op, StableIValue* arguments) {
    if (torch_call_dispatcher(op, "", arguments, TORCH_ABI_VERSION) == AOTI_TORCH_SUCCESS)
      return FLCE_OK;
    return flce_fail(FLCE_DEVICE_ERROR, "%s failed; torch has printed why", op);
  }

  flce_status begin(const char* op, flce_slot slot, void* recv, const void* send,
                    int64_t sent_bytes, int64_t bytes) const {
    StableIValue arguments[] = {value(bytes_of(recv, ranks_ * bytes)),
                                value(bytes_of(send, sent_bytes)), value(group_),
                                value(static_cast<int64_t>(slot))};
    return called(op, arguments);
  }

  static flce_status gather(void* self, flce_slot slot, void* recv, const void* send,
                            int64_t bytes) {
    const auto* own = static_cast<const Collectives*>(self);
    return own->begin("flce::comm_gather", slot, recv, send, bytes, bytes);
  }

  static flce_status exchange(void* self, flce_slot slot, void* recv, const void* send,
                              int64_t bytes) {
    const auto* own = static_cast<const Collectives*>(self);
    return own->begin("flce::comm_exchange", slot, recv, send, own->ranks_ * bytes, bytes);
  }

  static flce_status wait(void* self, flce_slot slot) {
    const auto* own = static_cast<const Collectives*>(self);
    StableIValue arguments[] = {value(own->group_), value(static_cast<int64_t>(slot))};
    return called("flce::comm_wait", arguments);
  }

  DeviceId id_;
  int64_t ranks_;
  std::string group_;
  flce_comm table_;
};

}  // namespace

#endif
