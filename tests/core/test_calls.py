"""flce/calls.py: the records have the operators' arguments and outputs, and nothing else in flce
takes these by position."""

import ast
from pathlib import Path

import pytest

from flce import calls
from flce.operators import inner

RECORDS = {
    calls.ForwardCall: (inner.forward, calls.ForwardOutputs),
    calls.BackwardCall: (inner.backward, calls.Gradients),
    calls.LogitsCall: (inner.cross_entropy_forward, calls.LogitsOutputs),
    calls.LogitsBackwardCall: (inner.cross_entropy_backward, None),
}
# Fields of records in a record whose names in the schemas say more.
OF_TEACHER = {"input": "teacher_input", "linear_weight": "teacher_weight"}
OF_TEACHER |= {"linear_bias": "teacher_bias", "temperature": "token_teacher_temperature"}


def flat_names(kind):
    names = []
    for name, annotation in kind.__annotations__.items():
        if annotation == calls.Teacher | None:
            names += [OF_TEACHER[field] for field in calls.Teacher._fields]
        elif annotation in calls.NESTED:
            names += flat_names(annotation)
        else:
            names.append(name)
    return names


@pytest.mark.parametrize("kind", RECORDS)
def test_records_are_the_operators_arguments(kind):
    op, outputs = RECORDS[kind]
    schema = op.default._schema
    assert flat_names(kind) == [argument.name for argument in schema.arguments]
    if outputs is not None:
        assert list(outputs._fields) == [returned.name for returned in schema.returns]


@pytest.mark.parametrize("kind", [*RECORDS, calls.SavedGradients])
def test_reading_is_the_inverse_of_flat(kind):
    values = list(range(len(flat_names(kind))))
    record = calls.read(kind, values)
    assert list(record.flat()) == values and type(record) is kind
    if kind is calls.ForwardCall:  # torch omits the last arguments that have their defaults
        loss = record._replace(teacher=None)
        values = loss.flat()
        assert calls.read(kind, values) == loss
        assert calls.read(kind, values[:-1]) == loss._replace(
            options=loss.options._replace(group=None)
        )


# Functions that give an operator's outputs, or a record of its arguments.
GIVE_RECORDS = {"run", "run_plain", "read", "saved", "with_forward_graph", "run_backward_into"}
# What they call gives a few numbers, in the order of a list of names.
ALLOWED = {"fakes.py: describe_sizes", "plan.py: _planned", "info.py: info"}


class Positions(ast.NodeVisitor):
    """Collects where the value of a call of GIVE_RECORDS is indexed by a number or a slice,
    unpacked by a starred target, or spread."""

    def __init__(self, path):
        self.path, self.function, self.found = path, "", []

    def visit_FunctionDef(self, node):
        before, self.function = self.function, node.name
        gives = [
            one.targets[0]
            for one in ast.walk(node)
            if isinstance(one, ast.Assign) and self.gives_record(one.value)
        ]
        names = {one.id for one in gives if isinstance(one, ast.Name)}
        for target in gives:
            if any(isinstance(part, ast.Starred) for part in ast.walk(target)):
                self.add(target)
        for one in ast.walk(node):
            value = getattr(one, "value", None)
            is_one = self.gives_record(value) or getattr(value, "id", None) in names
            if isinstance(one, ast.Starred) and is_one:
                self.add(one)
            if isinstance(one, ast.Subscript) and is_one:
                is_number = isinstance(one.slice, ast.Constant | ast.Slice | ast.UnaryOp)
                if is_number:
                    self.add(one)
        self.generic_visit(node)
        self.function = before

    @staticmethod
    def gives_record(node):
        function = getattr(node, "func", None)
        name = getattr(function, "attr", getattr(function, "id", None))
        return isinstance(node, ast.Call) and name in GIVE_RECORDS

    def add(self, node):
        self.found.append((f"{self.path.name}: {self.function}", node.lineno))


def positions_in(source, name="some.py"):
    visitor = Positions(Path(name))
    visitor.visit(ast.parse(source))
    return visitor.found


def test_nothing_else_takes_them_by_position():
    root = Path(calls.__file__).parent
    paths = [*root.glob("*.py"), *(root / "distributed").glob("*.py")]
    found = [
        one
        for path in paths
        if path.name != "calls.py"
        for one in positions_in(path.read_text(), path.name)
        if one[0] not in ALLOWED
    ]
    assert not found


@pytest.mark.parametrize(
    "line", ["made[0]", "made[1:]", "f(*made)", "a, *b = run(op)", "f(*run(op))", "run(op)[-1]"]
)
def test_positions_are_found(line):
    assert positions_in(f"def g(op):\n    made = run(op)\n    {line}\n")
