/* The Python module. Importing it runs the registrations of the operators; it also exports facts
 * about the build. */
#include <Python.h>

#include <cstdlib>

#include "binding/call.h"
#include "binding/device.h"
#include "binding/library.h"
#include "binding/options.h"
#include "environment.h"

using namespace flce;

namespace {

int64_t gemm_count() {
  return flce_gemm_count();
}
std::string cpu_variant() {
  return flce_cpu_variant();
}

/* The CUDA library's description of itself, or which file was searched for and why it cannot be
 * used. */
std::string cuda_describe() {
  const CudaLibrary& library = cuda_library();
  if (!library.error.empty()) return "not loaded: " + library.path + ": " + library.error;
  std::string text = library.path + "\n" + library.describe();
  if (!library.current_stream) {
    const bool unusable = text.find("\nnot usable: ") != std::string::npos;
    text += (unusable ? "; " : "\nnot usable: ") + std::string("this torch is built without CUDA");
  }
  return text;
}

/* getenv for Python, where os.environ takes 5 us for one that is not set. */
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

/* flce_read_environment() for Python, which holds the GIL here, as it does in os.putenv. */
PyObject* read_environment(PyObject*, PyObject*) {
  if (!flce_read_environment()) return PyErr_NoMemory();
  Py_RETURN_NONE;
}

/* take_none_counted() for Python, where a read of the loss takes longer. */
PyObject* none_counted(PyObject*, PyObject*) {
  return PyBool_FromLong(take_none_counted());
}

/* call_keeping(keeper, function, *arguments): what function(*arguments) returns. If it raises,
 * keeper.failed becomes (the exception, (function, *arguments)). In C, because a signal's handler
 * may raise before the first statement of a function in Python, outside of its `try`. */
PyObject* call_keeping(PyObject*, PyObject* arguments) {
  PyObject *keeper = PyTuple_GetItem(arguments, 0), *function = PyTuple_GetItem(arguments, 1);
  if (!keeper || !function) return nullptr;
  PyObject* own = PyTuple_GetSlice(arguments, 2, PyTuple_Size(arguments));
  PyObject* result = own ? PyObject_CallObject(function, own) : nullptr;
  Py_XDECREF(own);
  if (result) return result;
  PyObject *type, *error, *traceback;
  PyErr_Fetch(&type, &error, &traceback);
  PyErr_NormalizeException(&type, &error, &traceback);
  if (traceback) PyException_SetTraceback(error, traceback);
  PyObject* call = PyTuple_GetSlice(arguments, 1, PyTuple_Size(arguments));
  PyObject* failed = call ? PyTuple_Pack(2, error, call) : nullptr;
  if (!failed || PyObject_SetAttrString(keeper, "failed", failed) != 0) PyErr_Clear();
  Py_XDECREF(call);
  Py_XDECREF(failed);
  PyErr_Restore(type, error, traceback);
  return nullptr;
}

}  // namespace

FLCE_LIBRARY_FRAGMENT(m) {
  m.def("option_names() -> str");
  m.def("gemm_count() -> int");
  m.def("cpu_variant() -> str");
  m.def("cuda_describe() -> str");
}

FLCE_LIBRARY_IMPL(CompositeExplicitAutograd, m) {
  m.impl("option_names", TORCH_BOX(&flce::option_names));
  m.impl("gemm_count", TORCH_BOX(&gemm_count));
  m.impl("cpu_variant", TORCH_BOX(&cpu_variant));
  m.impl("cuda_describe", TORCH_BOX(&cuda_describe));
}

extern "C" FLCE_EXPORT PyObject* PyInit__C(void) {
  static PyMethodDef functions[] = {
      {"getenv", get_variable, METH_O, "The environment variable of this name, or None."},
      {"read_environment", read_environment, METH_NOARGS, "Copies flce's variables for its calls."},
      {"take_none_counted", none_counted, METH_NOARGS,
       "Whether this thread's last call was a mean over no row."},
      {"call_keeping", call_keeping, METH_VARARGS, "Calls a function, and keeps its exception."},
      {nullptr, nullptr, 0, nullptr}};
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", "flce's operators", -1, functions};
  return PyModule_Create(&module);
}
