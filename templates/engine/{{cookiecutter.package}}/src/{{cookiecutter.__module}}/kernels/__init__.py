{% include cookiecutter.array_library ~ "/kernels.py" %}
