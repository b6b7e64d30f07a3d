// The Python module: its import runs the registrations of the operators. And facts of the build.
#include <Python.h>

#include <cstdlib>

#include "torch_device.h"

namespace {

int64_t gemm_count() {
  return flce_gemm_count();
}
std::string cpu_variant() {
  return flce_cpu_variant();
}

// The CUDA library's own description, or what was looked for and why it does not serve.
std::string cuda_describe() {
  const CudaLibrary& library = cuda_library();
  if (!library.error.empty()) return "not loaded: " + library.path + ": " + library.error;
  return library.path + "\n" + library.describe();
}

// A call looks at two variables; os.environ takes 5 us for one that is not set.
PyObject* get_variable(PyObject*, PyObject* name) {
  PyObject* bytes = PyUnicode_EncodeFSDefault(name);
  if (!bytes) return nullptr;
  const char* text = PyBytes_AsString(bytes);
  const char* value = text ? std::getenv(text) : nullptr;
  Py_DECREF(bytes);
  if (!text) return nullptr;
  if (!value) Py_RETURN_NONE;
  return PyUnicode_DecodeFSDefault(value);
}

// Whether two tuples hold the same objects: a call's options and an earlier one's, of which none
// may be compared by value. all(map(operator.is_, ...)) takes four times as long.
PyObject* same_objects(PyObject*, PyObject* const* tuples, Py_ssize_t count) {
  if (count != 2) return PyErr_Format(PyExc_TypeError, "expected 2 tuples, got %zd", count);
  Py_ssize_t first = PyTuple_Size(tuples[0]), second = PyTuple_Size(tuples[1]);
  if (first < 0 || second < 0) return nullptr;
  bool same = first == second;
  for (Py_ssize_t i = 0; same && i < first; i++)
    same = PyTuple_GetItem(tuples[0], i) == PyTuple_GetItem(tuples[1], i);
  return PyBool_FromLong(same);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(flce, m) {
  m.def("gemm_count() -> int");
  m.def("cpu_variant() -> str");
  m.def("cuda_describe() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(flce, CompositeExplicitAutograd, m) {
  m.impl("gemm_count", TORCH_BOX(&gemm_count));
  m.impl("cpu_variant", TORCH_BOX(&cpu_variant));
  m.impl("cuda_describe", TORCH_BOX(&cuda_describe));
}

extern "C" FLCE_EXPORT PyObject* PyInit__C(void) {
  static PyMethodDef functions[] = {
      {"getenv", get_variable, METH_O, "The environment variable of this name, or None."},
      {"same_objects", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(same_objects)),
       METH_FASTCALL, "Whether two tuples hold the same objects."},
      {nullptr, nullptr, 0, nullptr}};
  static PyModuleDef module = {PyModuleDef_HEAD_INIT,
                               "_C",
                               "flce's operators",
                               -1,
                               functions,
                               nullptr,
                               nullptr,
                               nullptr,
                               nullptr};
  return PyModule_Create(&module);
}
