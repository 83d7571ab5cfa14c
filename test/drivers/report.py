"""What a driver's tests print for test/drivers/try, a line each."""


def _line(*cells):
    print(*(str(cell).replace('\t', ' ').replace('\n', ' ') for cell in cells), sep='\t', flush=True)


def error(row, message):
    """A row of the table of errors in the driver's section."""
    _line('error', row, message)


def is_(name, got, expected):
    _line('is', name, repr(got), repr(expected))


def ok(name, condition):
    is_(name, bool(condition), True)


def failure(call, *arguments):
    """What the call raises, or None."""
    try:
        call(*arguments)
    except Exception as raised:
        return raised
