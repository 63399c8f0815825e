{% include cookiecutter.__way ~ "/compiler.py" %}
